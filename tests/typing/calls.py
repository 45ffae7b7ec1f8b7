"""A user's calls for a type checker; a line that is wrong names mypy's error.  Nothing runs this file."""

import fusednorm
import numpy as np
import torch
from normserve.client import AsyncClient, Client
from normserve.client.torch import GroupNorm, LayerNorm
from torch import Tensor

x = torch.ones(2, 64)
weight, bias = torch.ones(64), torch.zeros(64)
array = np.ones((2, 64), np.float32)


def call_functions() -> Tensor:
    y: Tensor = fusednorm.layer_norm(x, weight, bias, 1e-5, activation="silu")
    y = fusednorm.rms_norm(y, weight, weight_offset=1.0)
    y = fusednorm.group_norm(y, 8, weight, bias, activation="gelu_tanh")
    y = fusednorm.instance_norm(y, weight, bias, activation="leaky_relu", negative_slope=0.2)
    y, total = fusednorm.add_layer_norm(x, y, weight)
    y, total = fusednorm.add_rms_norm(x, y, scale=x, shift=x, gate=x)
    fusednorm.rms_norm(x, gate=x)  # E: call-arg
    fusednorm.layernorm(x)  # E: attr-defined
    fusednorm.layer_norm(x, weight, bias, activation="mish")  # E: arg-type
    fusednorm.layer_norm(x, weight, bias, epsilon=1e-5)  # E: call-arg
    fusednorm.layer_norm([1.0, 2.0], weight)  # E: arg-type
    fusednorm.group_norm(x, "8")  # E: arg-type
    fusednorm.group_norm(x, 8, weight_offset=1.0)  # E: call-arg
    return y + total


def build_modules() -> Tensor:
    y: Tensor = fusednorm.LayerNorm(64, 1e-5, True, False, "cpu", torch.bfloat16, activation="silu")(x)
    y = fusednorm.LayerNorm((2, 64), elementwise_affine=False)(x)
    y = fusednorm.RMSNorm(64, eps=None, weight_offset=1.0)(y, x, shift=x)
    y = fusednorm.GroupNorm(8, 64, affine=True, activation="relu")(x, scale=x, shift=x)
    y = fusednorm.InstanceNorm3d(64, 1e-5, None, True, activation="leaky_relu", negative_slope=0.2)(y)
    fusednorm.InstanceNorm1d(64, activation="swish")  # E: arg-type
    fusednorm.InstanceNorm2d(64, num_groups=8)  # E: call-arg
    fusednorm.LayerNorm(64, activaton="silu")  # E: call-arg
    fusednorm.LayerNorm(64, epss=3)  # E: call-arg
    fusednorm.LayerNorm("64")  # E: arg-type
    fusednorm.RMSNorm(64, activation="swish")  # E: arg-type
    fusednorm.GroupNorm(8)  # E: call-arg
    fusednorm.GroupNorm(8, 64, weight_offset=1.0)  # E: call-arg
    fusednorm.LayerNorm(64)(array)  # E: arg-type
    shape: int = fusednorm.LayerNorm(64)(x)  # E: assignment
    return y + shape


def call_client(client: Client) -> None:
    y: Tensor = client.layer_norm(x, weight, bias, eps=1e-5, activation="silu").y
    of_numpy: np.ndarray[tuple[int, ...], np.dtype[np.float32]] = client.rms_norm(array, array[0]).y
    several: list[Tensor] = client.group_norm([x, x], 8, weight, bias, layout="nhwc").y
    dx: Tensor = client.layer_norm_backward(y, x, weight, bias).dx
    dx = client.rms_norm_backward(y, x, weight, layout="nchw").dx
    client.put_layer("name", "layer_norm", weight, bias)
    client.layer_norm([1.0, 2.0], weight)  # E: type-var
    client.layer_norm(x, [1.0, 2.0])  # E: arg-type
    client.layer_norm(x, activation="mish")  # E: arg-type
    client.layer_norm(x, epsilon=1e-5)  # E: call-arg
    client.rms_norm(x, layout="channels_last")  # E: arg-type
    client.group_norm(x, 8, layout="channels_last")  # E: arg-type
    client.put_layer("name", "batch_norm", weight)  # E: arg-type
    of_numpy = client.layer_norm(x).y  # E: assignment
    print(of_numpy, several, dx)


async def await_client(client: AsyncClient) -> Tensor:
    y: Tensor = (await client.layer_norm(x, weight)).y
    await client.layer_norm([1.0, 2.0])  # E: type-var
    print(client.layer_norm(x).y)  # E: attr-defined
    return y


def build_remote_modules(client: Client) -> Tensor:
    y: Tensor = LayerNorm(64, client=client, activation="relu")(x)
    y = LayerNorm(64, client=client, layout="nchw")(y, scale=x)
    y = GroupNorm(8, 64, client=client)(y, scale=x)
    LayerNorm(64)  # E: call-arg
    LayerNorm(64, client=client, layout="nhwc")  # E: arg-type
    LayerNorm(64, client=client, activation="mish")  # E: arg-type
    return y
