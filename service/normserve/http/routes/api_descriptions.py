"""The OpenAPI description of a request's tensors."""

from normserve.codec.tensor_names import CHAIN_PARAMETERS
from normserve.jobs.job import Op, PassDirection
from normserve.jobs.validation import list_tensor_names

_DOCS = {
    "x": "the tensor to normalise, `[..., N]`",
    "weight": "optional, `[N]`, or `[H, N]` for x `[..., H, N]`: multiplies what is normalised",
    "bias": "optional, as weight: is added after it",
    "scale": "optional, `[B, C]` in either layout: each sample's own; `1 + scale` multiplies after weight and bias",
    "shift": "optional, `[B, C]` in either layout: each sample's own; is added after scale",
    "residual": "optional, in x's shape: `x + residual` is normalised, and forward returns it as residual_out",
    "dy": "required, as x: the gradient of y",
    "mean": "optional, float32, together with rstd: what forward returned with stats",
    "rstd": "optional, float32: what forward returned with stats",
    "dresidual_out": "optional, in x's shape: a gradient that reached residual_out from elsewhere, added to dx",
}
_DOCS_OF_GROUPS = {
    "x": "the tensor to normalise, `[B, C, *spatial]`, or `[B, *spatial, C]` with layout=nhwc",
    "weight": "optional, `[C]`: multiplies what is normalised",
    "bias": "optional, `[C]`: is added after weight",
}


def describe_tensors(op: Op, direction: PassDirection) -> str:
    """Describe the tensors that a body of one operation may contain, as Markdown."""
    docs = _DOCS | _DOCS_OF_GROUPS if op is Op.GROUP_NORM else _DOCS
    docs |= {name: f"optional, `[N]`, of norm {name[-1]} of the chain" for name in CHAIN_PARAMETERS}
    lines = [f"- `{name}`: {docs[name]}" for name in list_tensor_names(op, direction)]
    or_npy = ", or npy of x alone" if direction is PassDirection.FORWARD else ""
    return "\n".join([f"Safetensors of these by their names{or_npy}:", "", *lines])
