"""torch modules whose forward and backward passes run in the service, over any transport of a client.

    from normserve.client import Client
    from normserve.client.torch import LayerNorm

    client = Client("unix:///run/normserve.sock")
    norm = LayerNorm(1024, client=client)

Constructors, parameters, state_dict and repr are those of torch's modules, with the additional arguments `client`,
`activation`, `negative_slope` and, except for GroupNorm, `weight_offset`.  The parameters belong to the module and
are sent with each call; an optimizer can train them.

- Backward needs x, the parameters and the statistics of forward; they are kept only where gradients may be
  requested.  Second derivatives are refused.
- Failures are the client's exceptions (`normserve.client.errors`), in backward, too.
- A copy of a module (`copy.deepcopy`) shares its client.  A pickled module has none: set `module.client`.
- For `torch.compile` a module is a graph break; `torch.jit.trace`, which would record the result as a constant, is
  refused.
- Under autocast a result has the dtype that torch's module gives it.
"""

from normserve.client.torch.modules import GroupNorm, LayerNorm, RMSNorm

__all__ = ["GroupNorm", "LayerNorm", "RMSNorm"]
