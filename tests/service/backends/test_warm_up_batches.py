"""What a backend runs before it is ready: everything, at the lengths that were named."""

from normserve.backends.warm_up_batches import make_warm_up_batches
from normserve.jobs.job import LAYER_OPS, Op, PassDirection
from normserve.memory.tensors import FLOATS


def test_every_operation_on_every_length_with_parameters_and_without():
    batches = list(make_warm_up_batches([8, 300]))
    kinds = {
        (
            job.x.shape[-1],
            job.spec.op,
            job.spec.direction,
            job.x.dtype,
            tuple(sorted(job.tensors.keys() - {"x", "dy"})),
        )
        for batch in batches
        for job in batch.jobs
    }
    parameters = {op: [(), ("weight",) if op is Op.RMS_NORM else ("bias", "weight")] for op in LAYER_OPS}
    assert kinds == {
        (size, op, direction, dtype, names)
        for size in (8, 300)
        for op in LAYER_OPS
        for direction in PassDirection
        for dtype in FLOATS
        for names in parameters[op]
    }
    assert len(kinds) == len(batches)


def test_groups_come_out_even():
    for batch in make_warm_up_batches([300, 7]):
        spec, x = batch.jobs[0].spec, batch.jobs[0].x
        assert spec.op is not Op.GROUP_NORM or x.shape[1] % spec.num_groups == 0
