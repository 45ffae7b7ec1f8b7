"""Arrays over a mesh around a pass, which computes whole arrays and divides none."""

from typing import TypeVar

import jax
from jax import lax
from jax.sharding import NamedSharding

T = TypeVar("T")


def gather(array: jax.Array) -> jax.Array:
    """Gather an array that is sharded over explicit axes of a mesh, as a pass needs; its gradient is sharded."""
    return reshard(array, jax.typeof(array).sharding.update(spec=jax.P()))


def get_axis_sharding(array: jax.Array, axis: int) -> NamedSharding:
    """Return how one axis of an array is sharded over explicit axes of a mesh, as the sharding of a first axis."""
    sharding = jax.typeof(array).sharding
    made: NamedSharding = sharding.update(spec=jax.P(sharding.spec[axis]))
    return made


def reshard(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Shard an array over explicit axes of a mesh; without such an axis it is the array itself."""
    if any(sharding.spec) or any(jax.typeof(array).sharding.spec):
        return jax.sharding.reshard(array, sharding)
    return array


def vary_alike(arrays: T) -> T:
    """Make the arrays in a tree vary over the same axes of the mesh of a `shard_map`, as passes need.

    The gradient of an array that varied over fewer axes is then the sum over the others.
    """
    axes = frozenset().union(*(jax.typeof(each).manual_axis_type.varying for each in jax.tree.leaves(arrays)))

    def vary(array: jax.Array) -> jax.Array:
        others = axes - jax.typeof(array).manual_axis_type.varying
        return lax.pcast(array, tuple(others), to="varying") if others else array

    made: T = jax.tree.map(vary, arrays)
    return made
