"""Muon: the momentum of a matrix, made orthogonal by Newton–Schulz; AdamW for what is no matrix of a layer.

Keller Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon): the iteration and its coefficients. Liu et al. 2025,
"Muon is Scalable for LLM Training" (arXiv:2502.16982): weight decay, and updates as large as AdamW's, so that its rates hold.

Which dims are rows and columns of a matrix is declared with the parameter (`Param.inputs`), never guessed from a shape: of a
stack of layers or experts each row is a matrix. On a mesh whole matrices are dealt round the devices: each gets the pieces of
its share from the others, multiplies alone, and sends them back, so that no device repeats what another does.

`optax.contrib.muon` does stacks, but does not serve here. The state of its partition is a tree of another structure than the
parameters, so that it would not be sharded, streamed or planned like them. Its products are left to the compiler, which then
gathers each matrix on every device, or sums parts of each product over the mesh. Adam, of the other parameters, is optax's.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from ejdist.layout import axes_in
from ejdist.mapped import map_shards
from ejdist.models.parameters import Param, map_declared

# Of x, x³ and x⁵. They take singular values of 0.003 and more to between 0.7 and 1.2 in five steps, and no closer: the steepest
# slope at 0 is worth more than a limit of exactly 1.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
PRODUCTS = ("bfloat16", "float32")
# Numbers of the matrices that are multiplied at once: enough to fill a device, and little beside the state of a large model.
AT_ONCE = 2**26
_STACKED = ("L", "E")


@dataclass
class MuonSection:
    """The section `optimizer.muon` of a recipe, read with `optimizer.name=muon`. `optimizer.b1`, `b2` and `eps` are of the
    parameters that AdamW keeps: vectors, embedding, output projection, router."""

    momentum: float = 0.95  # decay of the momentum
    nesterov: bool = True  # look one step ahead: the gradient plus the decayed momentum
    steps: int = 5  # how many steps of Newton–Schulz make a matrix orthogonal
    rms: float = 0.2  # of an update over the rate, as AdamW's is: times the root of the longer side of the matrix
    products: str = "bfloat16"  # dtype of the matrices while they are made orthogonal
    # Parameters beside the matrices of layers that Muon takes too, such as [router, embedding].
    also: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.also = tuple(self.also)

    def validate(self) -> None:
        """Raises ValueError naming the key and the remedy."""
        if not 0 <= self.momentum < 1:
            raise ValueError(f"optimizer.muon.momentum must be in [0, 1), got {self.momentum}")
        if not 1 <= self.steps <= 20:
            raise ValueError(f"optimizer.muon.steps must be from 1 to 20, got {self.steps}")
        if not 0 < self.rms < math.inf:
            raise ValueError(f"optimizer.muon.rms must be positive, got {self.rms}")
        if self.products not in PRODUCTS:
            raise ValueError(f"optimizer.muon.products = {self.products!r} is unknown; use {' or '.join(PRODUCTS)}")


@dataclass(frozen=True)
class Matrices:
    """How a parameter is a stack of matrices: which of its dims are the stack, the rows and the columns, and how each of these
    is split over the axes of a mesh."""

    shape: tuple[int, ...]
    dims: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    axes: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]] = ((), (), ())
    place: NamedSharding | None = field(default=None, compare=False)

    def on(self, place: NamedSharding) -> Matrices:
        """Returns the same of a parameter that is sharded so."""
        entries = [*place.spec, *[None] * (len(self.shape) - len(place.spec))]
        sizes = place.mesh.shape
        stack, rows, columns = (
            tuple(a for a in axes_in(entries[i] for i in part) if sizes[a] > 1) for part in self.dims
        )
        return replace(self, axes=(stack, rows, columns), place=place)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """How many matrices, and their rows and columns."""
        count, rows, columns = (math.prod(self.shape[i] for i in part) for part in self.dims)
        return count, rows, columns

    @property
    def turned(self) -> bool:
        """Whether rows and columns change places, so that parameters with equal matrices are dealt together."""
        (_, rows, columns), (_, over_rows, over_columns) = self.sizes, self.axes
        return (rows, over_rows) > (columns, over_columns)

    @property
    def kind(self) -> tuple[Any, ...]:
        """What parameters have alike that are dealt together: short and long side, and the axes of these and of the stack."""
        (_, *sides), (stack, *over) = self.sizes, self.axes
        step = -1 if self.turned else 1
        return stack, *sides[::step], *over[::step]

    def stacked(self, x: jax.Array) -> jax.Array:
        """Returns [matrices, short, long] of the parameter, or of a device's piece of it."""
        stack, rows, columns = self.dims
        order = (*stack, *columns, *rows) if self.turned else (*stack, *rows, *columns)
        short = len(columns if self.turned else rows)
        shape = [x.shape[i] for i in order]
        parts = shape[: len(stack)], shape[len(stack) : len(stack) + short], shape[len(stack) + short :]
        return x.transpose(order).reshape([math.prod(part) for part in parts])

    def unstacked(self, x: jax.Array, like: jax.Array) -> jax.Array:
        """Returns what `stacked` made of an array of the shape of `like`."""
        stack, rows, columns = self.dims
        order = (*stack, *columns, *rows) if self.turned else (*stack, *rows, *columns)
        back = [order.index(i) for i in range(len(order))]
        return x.reshape([like.shape[i] for i in order]).transpose(back)

    @property
    def flops(self) -> int:
        """Of one step of Newton–Schulz of one matrix, a multiply-add as 2."""
        short, long = sorted(self.sizes[1:])
        return 4 * short * short * long + 2 * short**3


def matrices_of(path: str, param: Param, also: bool = False) -> Matrices | None:
    """Returns how a parameter is a stack of matrices, None where AdamW keeps it.

    A dim of layers or experts is the stack, and so is one that is never split between the inputs and the outputs of a matrix:
    it tells gate from up, which lie side by side. Of several outputs, as those of heads, one matrix is made.

    Args:
      also: take it though it declares no inputs: its first dim that is not of the stack then has the rows.

    Raises:
      ValueError: it is no matrix, and shall be taken.
    """
    if not (param.inputs or also):
        return None
    names = param.dims.split()
    rest = [i for i, dim in enumerate(names) if dim not in _STACKED]
    rows = [i for i in rest if names[i] in param.inputs.split()] if param.inputs else rest[:1]
    columns = [i for i in rest if i not in rows]
    if any(names[i] != "_" for i in columns):
        columns = [i for i in columns if names[i] != "_"]
    if not rows or not columns:
        raise ValueError(
            f"optimizer.muon takes matrices, and {path} {list(param.shape)} is a vector"
            f"{' of each layer' if names[:1] == ['L'] else ''}; leave it out of optimizer.muon.also"
        )
    stack = [i for i in range(len(names)) if i not in (*rows, *columns)]
    return Matrices(param.shape, (tuple(stack), tuple(rows), tuple(columns)))


def all_matrices(declared: Any, section: MuonSection, placed: Any = None) -> Any:
    """Returns the tree of `Matrices`, with None for the parameters that AdamW keeps.

    Args:
      declared: tree of `Param`. placed: tree of their `NamedSharding`s; None: on one device.

    Raises:
      ValueError: `optimizer.muon.also` names a parameter that is no matrix, or none; or nothing is a matrix.
    """
    names: list[str] = []

    def one(path: str, param: Param) -> Matrices | None:
        names.append(path.rpartition(".")[2])
        return matrices_of(path, param, names[-1] in section.also)

    tree = map_declared(one, declared)
    if unknown := [name for name in section.also if name not in names]:
        raise ValueError(
            f"optimizer.muon.also names {unknown[0]!r}, which the model does not have; its parameters are "
            f"{', '.join(sorted({*names}))}"
        )
    if not any(isinstance(x, Matrices) for x in _leaves(tree)):
        raise ValueError(
            "optimizer.name = muon has no matrix of a layer to take: adapters, and layers that declare no `Param.inputs`, are "
            "kept by AdamW; use optimizer=adamw"
        )
    if placed is None:
        return tree

    return jax.tree.map(lambda of, place: None if of is None else of.on(place), tree, placed, is_leaf=_is_leaf)


def _is_leaf(x: Any) -> bool:
    return x is None or isinstance(x, Matrices)


def _leaves(tree: Any) -> list[Matrices | None]:
    return jax.tree.leaves(tree, is_leaf=_is_leaf)


def newton_schulz(x: jax.Array, steps: int) -> jax.Array:
    """Returns matrices [..., m, n] with the same singular vectors and singular values near 1: X <- aX + (bA + cA²)X with
    A = XXᵀ, from X of Frobenius norm 1. Of the shorter side are A and what it is multiplied with."""
    if x.shape[-2] > x.shape[-1]:
        return jnp.swapaxes(newton_schulz(jnp.swapaxes(x, -2, -1), steps), -2, -1)
    # bfloat16 is rounded once a product; float32 is not multiplied in less.
    precision = "highest" if x.dtype == jnp.float32 else "default"
    norm = jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=(-2, -1), keepdims=True))
    # A matrix of zeros stays one. No number is added to the norm: gradients may be smaller than any that one would choose.
    x = (x.astype(jnp.float32) / jnp.where(norm > 0, norm, 1.0)).astype(x.dtype)
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        gram = jnp.einsum("...mk,...nk->...mn", x, x, precision=precision)
        poly = b * gram + c * jnp.matmul(gram, gram, precision=precision)
        x = a * x + jnp.matmul(poly, x, precision=precision)
    return x


def _orthogonal(x: jax.Array, steps: int) -> jax.Array:
    """Returns `newton_schulz` of [matrices, m, n], a few matrices after the other."""
    count, rows, columns = x.shape
    together = max(1, AT_ONCE // (rows * columns))
    if count <= together:
        return newton_schulz(x, steps)
    return jax.lax.map(lambda one: newton_schulz(one, steps), x, batch_size=together)


def alike(of: Sequence[Matrices]) -> list[list[int]]:
    """Returns which parameters are dealt together; on one device there is nothing to deal, and each is alone."""
    kinds: dict[Any, list[int]] = defaultdict(list)
    for i, m in enumerate(of):
        kinds[i if m.place is None or m.place.mesh.size == 1 else m.kind].append(i)
    return list(kinds.values())


def dealt_over(kind: tuple[Any, ...], sizes: Mapping[str, int]) -> tuple[tuple[str, ...], ...]:
    """Returns the axes over which matrices of a kind are dealt: those that split the short side, those that split the long one,
    and those along which devices have the same pieces. Experts that are split stay where they are."""
    stack, *_, short, long = kind
    return short, long, tuple(a for a, n in sizes.items() if n > 1 and a not in (*stack, *short, *long))


def _dealt(pieces: Sequence[jax.Array], of: Sequence[Matrices], mesh: Any, steps: int) -> list[jax.Array]:
    """Returns a device's pieces of parameters of one kind, made orthogonal; inside of a `map_shards` over the mesh.

    Every device has a piece of each matrix. An exchange along the axes that split the rows, and one along those that split the
    columns, leave it with whole matrices of its share; devices that have the same pieces take a part each."""
    stacks = [m.stacked(x) for m, x in zip(of, pieces, strict=True)]
    over_short, over_long, same = dealt_over(of[0].kind, mesh.shape)
    ranks = math.prod(mesh.shape[a] for a in (*over_short, *over_long, *same))
    x = jnp.concatenate(stacks)
    count = len(x)
    # Without the barrier XLA for CPUs sends the stacks themselves, one of them transposed, and refuses the layouts (jax 0.11).
    x = jax.lax.optimization_barrier(jnp.pad(x, ((0, -count % ranks), (0, 0), (0, 0))))
    with jax.named_scope("exchange"):
        for axes, side in ((over_short, 1), (over_long, 2)):
            x = jax.lax.all_to_all(x, axes, 0, side, tiled=True) if axes else x
    if same:
        share = len(x) // math.prod(mesh.shape[a] for a in same)
        x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(same) * share, share)
    x = _orthogonal(x, steps)
    with jax.named_scope("exchange"):
        x = jax.lax.all_gather(x, same, axis=0, tiled=True, to="invarying") if same else x
        for axes, side in ((over_long, 2), (over_short, 1)):
            x = jax.lax.all_to_all(x, axes, side, 0, tiled=True) if axes else x
    ends = itertools.accumulate((len(stack) for stack in stacks), initial=0)
    parts = [x[start:stop] for start, stop in itertools.pairwise(ends)]
    return [m.unstacked(part, piece) for m, part, piece in zip(of, parts, pieces, strict=True)]


def orthogonal(momenta: Sequence[jax.Array], of: Sequence[Matrices], section: MuonSection) -> list[jax.Array]:
    """Returns the updates of parameters, of the RMS that the section asks for: each matrix is made orthogonal, and scaled.

    Args:
      momenta: of the parameters, as these are sharded. of: how each is a stack of matrices.
    """
    results: list[Any] = [None] * len(of)
    for which in alike(of):
        group = [of[i] for i in which]
        pieces = [momenta[i].astype(section.products) for i in which]
        place = group[0].place
        if place is not None and place.mesh.size > 1:
            mesh, specs = place.mesh, [m.place.spec for m in group if m.place is not None]

            def dealt(pieces: Sequence[jax.Array], group: Any = group, mesh: Any = mesh) -> list[jax.Array]:
                return _dealt(pieces, group, mesh, section.steps)

            updates = map_shards(dealt, mesh, (specs,), specs)(pieces)
        else:
            (m,), (x,) = group, pieces
            updates = [m.unstacked(_orthogonal(m.stacked(x), section.steps), x)]
        for i, m, update in zip(which, group, updates, strict=True):
            _, rows, columns = m.sizes
            results[i] = section.rms * math.sqrt(max(rows, columns)) * update.astype(jnp.float32)
    return results


def scale_by_muon(of: Any, section: MuonSection, adam: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns the transformation of gradients into directions, before weight decay and rate.

    Its state is Adam's, of which a matrix has the first moment alone, its momentum; in place of the second is a number.

    Args:
      of: `all_matrices(...)` of the parameters. adam: `optax.scale_by_adam(...)`, for the others.
    """
    ways = _leaves(of)
    ours = {i: m for i, m in enumerate(ways) if m is not None}
    others = [i for i, m in enumerate(ways) if m is None]

    def flat(tree: Any) -> tuple[list[Any], Any]:
        leaves, structure = jax.tree.flatten(tree)
        if len(leaves) != len(ways):
            raise ValueError(f"muon was made for {len(ways)} parameters, and its update has {len(leaves)}")
        return leaves, structure

    def init(params: Any) -> Any:
        leaves, tree = flat(params)
        nu = [jnp.zeros(() if i in ours else x.shape, jnp.float32) for i, x in enumerate(leaves)]
        mu = [jnp.zeros(x.shape, jnp.float32) for x in leaves]
        return optax.ScaleByAdamState(jnp.zeros((), jnp.int32), tree.unflatten(mu), tree.unflatten(nu))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        leaves, tree = flat(updates)
        mu, nu = jax.tree.leaves(state.mu), jax.tree.leaves(state.nu)
        small: Any = optax.ScaleByAdamState(state.count, [mu[i] for i in others], [nu[i] for i in others])
        kept: Any = [leaves[i] for i in others]
        of_others: Any = adam.update(kept, small)
        kept, small = of_others
        for k, i in enumerate(others):
            leaves[i], mu[i], nu[i] = kept[k], small.mu[k], small.nu[k]
        ahead = []
        for i in ours:
            mu[i] = section.momentum * mu[i] + leaves[i]
            ahead.append(section.momentum * mu[i] + leaves[i] if section.nesterov else mu[i])
        for i, x in zip(ours, orthogonal(ahead, [*ours.values()], section), strict=True):
            leaves[i] = x
        return tree.unflatten(leaves), small._replace(mu=tree.unflatten(mu), nu=tree.unflatten(nu))

    return optax.GradientTransformation(init, update)
