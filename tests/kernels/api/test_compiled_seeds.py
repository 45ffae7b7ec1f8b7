"""A call with dropout is compiled once, whatever its seed."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests.kernels.api.norm_calls import CALLS, inputs


# torch's own warning, of what it looks at where a graph breaks.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "add_layer_norm", "group_norm"])
@pytest.mark.parametrize("seeds", [(1, 2, 2**40, -7, 5, 0), (None,) * 6])
def test_other_seeds_need_no_other_compilation(name, seeds):
    """Without a seed, the graph breaks where one is drawn."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def run(seed, *given):
        result = CALLS[name](*given, dropout=0.5, seed=seed)
        return result[0] if isinstance(result, tuple) else result

    compiled = torch.compile(run, backend=counter, fullgraph=seeds[0] is not None)
    compiled_after = []
    for seed in seeds:
        given, state = inputs(name, dtype=torch.float32), torch.get_rng_state()
        compiled(seed, *given).sum().backward()
        gradient, given[0].grad = given[0].grad, None
        torch.set_rng_state(state)
        run(seed, *given).sum().backward()
        torch.testing.assert_close(gradient, given[0].grad, rtol=0, atol=0)
        compiled_after.append(counter.frame_count)
    # The first, the second that makes the seed an input, and that of a seed of 0, or where the graph breaks.
    assert compiled_after[-1] <= 4
    assert compiled_after[2] == compiled_after[4]
    torch.compiler.reset()
