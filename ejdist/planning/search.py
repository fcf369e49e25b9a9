"""The search: every legal mesh, remat policy, accumulation and batch, by predicted memory and time; the best are compiled.

How keys travel over sp, how tokens lie there and how tokens get to experts change little of a plan, so only the fastest plans
are tried with each of these: all begin with the first scheme, the most even order and the first dispatch that fit. What a
scheme leaves open (`details`) is tried last.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ejdist.documents import ONE_DOCUMENT, Documents
from ejdist.mesh import AXES, between_slices, mesh_shape
from ejdist.models.mixture import has_experts
from ejdist.models.remat import REMAT as POLICIES
from ejdist.order import AUTO
from ejdist.order import NAMES as ORDERS
from ejdist.planning.candidates import (
    ACCUMULATION,
    BATCH,
    DISPATCH,
    ORDER,
    REMAT,
    SCHEME,
    Candidate,
    Savings,
    candidate_of,
    candidates,
    details,
    products,
    rows_over,
    savings_searched,
    ways,
)  # fmt: skip
from ejdist.planning.compiled import Compiled, DoesNotFit
from ejdist.planning.expert_axes import of_each_kind, precision_refusal, ranks_of, refusal
from ejdist.planning.links import Links
from ejdist.planning.measured import Measured
from ejdist.planning.memory import Held, Memory, held, memory
from ejdist.planning.ranking import Predicted, different, ranked
from ejdist.planning.share import dispatch_of, share_of
from ejdist.planning.step_time import step_time
from ejdist.planning.targets import Target
from ejdist.precision import check_device
from ejdist.sections import validate
from ejdist.sequence.schemes import SCHEMES
from ejdist.training.attending import held as kept
from ejdist.training.attending import ranked_pairs
from ejdist.training.losses import trained_model
from kernels.framework.platforms import Unsupported

VARIED = 50  # plans that are tried with each of these
DETAILED = 12  # and of all those the ones that are tried with other keys of their scheme
# How much too small a prediction may be.
MARGIN = 0.10
FASTER = 0.05  # by how much a plan that keeps activations on the host must be faster than one that does not


@dataclass(frozen=True)
class Found:
    """The result of a search.

    best: None where nothing fits. compiled: of the best; None where no compiler could be asked. others: the next best with
    another mesh or remat policy, predicted. refused: what did not compile or fit, and why. looked_at: legal candidates.
    smallest: what needs least, where nothing is expected to fit. unsaved: what needs least without the savings of the best,
    which does not fit. experts: of a model that has some, where the mesh leaves it open, the best plan that fits with experts
    over devices, and with all of them on each.
    """

    best: Predicted | None
    compiled: Compiled | None
    others: Sequence[Predicted] = ()
    refused: Sequence[tuple[Predicted, str]] = ()
    looked_at: int = 0
    smallest: Predicted | None = None
    unsaved: Predicted | None = None
    experts: tuple[Predicted | None, Predicted | None] | None = None
    too_large: bool = True  # whether what was refused was refused for its memory


class Predictor:
    """Predicts the steps of one recipe on one target. What a mesh holds is computed once, whatever the batch and remat."""

    def __init__(
        self,
        sections: Any,
        target: Target,
        measured: Measured | None = None,
        documents: Documents = ONE_DOCUMENT,
    ) -> None:
        check_device(sections.model.precision, target.device)
        self.sections, self.target, self.model, self.documents = sections, target, trained_model(sections), documents
        self.links = Links(target.chip, target.per_host, target.slices, measured, target.side)
        self._held: dict[tuple[int, ...], Held | None] = {}

    def __call__(self, candidate: Candidate, room: float = math.inf) -> Memory | Predicted | None:
        """Returns the prediction; memory alone where that is more than `room`, None for what is not legal."""
        s = candidate.applied(self.sections)
        rows = s.data.global_batch // s.accumulation // rows_over(candidate.sizes)
        halved = s.experts.overlaps(candidate.sizes, has_experts(s.model))
        if halved and rows < 2:  # which hangs on the batch, as nothing below does
            return None
        if candidate.mesh not in self._held:
            try:
                self._held[candidate.mesh] = self._legal(s, candidate)
            except ValueError:
                self._held[candidate.mesh] = None
        of = self._held[candidate.mesh]
        return None if of is None else self._predicted(s, candidate, of, room)

    @property
    def rows(self) -> tuple[Documents, str]:
        """What decides how even the rows are: their documents, and the platform, whose kernels have tiles."""
        return self.documents, self.target.chip.platform

    def checked(self, candidate: Candidate) -> Predicted:
        """Returns the prediction. Raises ValueError, naming the size, for what is not legal."""
        s = candidate.applied(self.sections)
        prediction = self._predicted(s, candidate, self._legal(s, candidate), math.inf)
        assert isinstance(prediction, Predicted)
        return prediction

    def as_a_run(self, candidate: Candidate) -> Candidate:
        """Returns a candidate with the scheme and the order that a run takes where a recipe leaves them open."""
        s, mesh = self.sections, candidate.abstract_mesh()
        if AUTO not in (s.sequence.scheme, s.sequence.order) or candidate.ranks == 1:
            return candidate
        seconds, holds, plans = {}, {}, {}
        for scheme, order, _ in ways(s, candidate.mesh, {SCHEME, ORDER, DISPATCH}, *self.rows):
            one = replace(candidate, scheme=scheme or candidate.scheme, order=order or candidate.order)
            of = one.applied(s)
            pair = of.sequence.scheme, of.sequence.order
            plans[pair], seconds[pair] = one, self.checked(one).time.attending
            holds[pair] = kept(s.model, share_of(of, mesh, self.links, self.target.chip.tile, self.documents))
        in_turn = sorted(plans, key=lambda pair: ([*SCHEMES].index(pair[0]), ORDERS.index(pair[1])))
        best, *_ = ranked_pairs(*({pair: table[pair] for pair in in_turn} for table in (seconds, holds)))
        return plans[best]

    def _legal(self, s: Any, candidate: Candidate) -> Held:
        """Returns what the candidate's mesh holds. Raises ValueError, naming the size, where it does not fit."""
        validate(s)
        if (n := self.target.slices) > 1:
            slices = [range(self.target.count // n)] * n
            between_slices(candidate.sizes, slices, s.mesh.fsdp_across_slices)
        if (why := refusal(s, tuple(candidate.sizes[a] for a in s.experts.axes if a in AXES))) is not None:
            raise ValueError(why)
        return held(s, self.model, candidate.abstract_mesh())

    def _predicted(self, s: Any, candidate: Candidate, of: Held, room: float) -> Memory | Predicted:
        mesh = candidate.abstract_mesh()
        if s.experts.dispatch == "auto" and has_experts(s.model):
            s = replace(s, experts=replace(s.experts, dispatch=dispatch_of(s, mesh, self.links)))
        needed = memory(s, of, mesh, self.target.chip.platform, self.target.chip.tile)
        if needed.total > room or (room < math.inf and self.target.host_bytes(needed.host) > self.target.room_of_host):
            return needed
        time = step_time(s, of, mesh, self.links, documents=self.documents)
        return Predicted(candidate, needed, time, s.data.global_batch * s.data.sequence_length)


# -- the search -------------------------------------------------------------------------------------------------------


def search(
    sections: Any,
    target: Target,
    given: Collection[str],
    compile_step: Callable[[Any], Compiled | None] | None,
    *,
    finalists: int = 3,
    measured: Measured | None = None,
    documents: Documents = ONE_DOCUMENT,
    log: Callable[[str], None] = lambda line: None,
    save: bool = True,
) -> Found:
    """Returns the best plan of a recipe. Where none fits, activations and moments on the host, moments in bfloat16 and sums of
    gradients in bfloat16 are tried, in the order of `SAVINGS`; activations on the host also where attention would run twice.

    Args:
      given: keys of `SEARCHED` that stay as the recipe has them.
      compile_step: sections -> the compiler's report, None without a compiler; raises `DoesNotFit` where it refuses.
        None: predictions alone.
      finalists: how many may be compiled until one fits.
      measured: how fast the devices communicate; None by the data sheet.
      documents: of the rows.
      log: called with a line before each compilation.
      save: whether to try these.

    Raises:
      ValueError: the given sizes fit no plan. It or `Unsupported`: layers refuse every plan that is compiled.
    """
    validate(sections)
    on_each = all(f"mesh.{a}" in given and getattr(sections.mesh, a) == 1 for a in sections.experts.axes)
    if DISPATCH in given and not on_each and (why := precision_refusal(sections)) is not None:
        raise ValueError(why)
    predictor, tried = Predictor(sections, target, measured, documents), []
    tiers = savings_searched(sections, given) if save else [()]

    def attempt(savings: Savings) -> Found:
        tried.append(_search(predictor, given, compile_step, finalists, log, savings))
        return tried[-1]

    first = last = attempt(tiers[0])
    for savings in tiers[1:]:
        if last.best is not None or not last.too_large:
            break
        last = attempt(savings)
    if len(tiers) > 1 and first.best and REMAT not in given and not POLICIES[first.best.candidate.remat].asked:
        # Attention would run twice, which may take longer than moving its results to the host and back.
        away = attempt(tiers[1])
        last = away if away.best and _faster(away.best, first.best) else first
    unsaved = first.smallest or first.refused[-1][0] if first.best is None and last.best is not None else None
    refused = [one for some in tried for one in some.refused]
    return replace(last, looked_at=sum(some.looked_at for some in tried), refused=refused, unsaved=unsaved)


def _faster(plan: Predicted, than: Predicted) -> bool:
    return plan.tokens / plan.time.total > (1 + FASTER) * than.tokens / than.time.total


def _search(
    predictor: Predictor,
    fixed_keys: Collection[str],
    compile_step: Callable[[Any], Compiled | None] | None,
    finalists: int,
    log: Callable[[str], None],
    savings: Savings,
) -> Found:
    """Returns the best plan with these savings."""
    sections, target, fitting, count = predictor.sections, predictor.target, [], 0
    smallest: tuple[int, Candidate] | None = None
    room = target.chip.memory / (1 + MARGIN)
    for candidate in candidates(sections, target.count, fixed_keys, savings, *predictor.rows):
        prediction = predictor(candidate, room)
        if prediction is None:
            continue
        count += 1
        if isinstance(prediction, Predicted):
            fitting.append(prediction)
        elif smallest is None or prediction.total < smallest[0]:
            smallest = prediction.total, candidate
    if not count:
        _explain(sections, target, fixed_keys, predictor)

    def attempt(others: Iterable[Candidate]) -> None:
        nonlocal count, smallest
        for other in others:
            prediction = predictor(other, room)
            count += 1
            if isinstance(prediction, Predicted):
                fitting.append(prediction)
            elif prediction is not None and (smallest is None or prediction.total < smallest[0]):
                smallest = prediction.total, other

    def first(most: int) -> list[Candidate]:
        """Returns the fastest plans; where nothing fits the smallest, of which another kind may need less."""
        return [plan.candidate for plan in ranked(fitting)[:most]] or ([smallest[1]] if smallest else [])

    split = {id(p): ranks_of(sections, p) > 1 for p in fitting}
    varied = [*first(VARIED), *(p.candidate for p in ranked([p for p in fitting if split[id(p)]])[:DETAILED])]
    for of in dict.fromkeys(varied):
        kinds = itertools.islice(ways(sections, of.mesh, fixed_keys, *predictor.rows), 1, None)
        attempt(replace(of, scheme=scheme, order=order, dispatch=dispatch) for scheme, order, dispatch in kinds)
        attempt(products(sections, of, fixed_keys))
    tight = not fitting
    for of in first(DETAILED):
        attempt(details(sections, of, fixed_keys, predictor.documents, tight))
    least = predictor.checked(smallest[1]) if smallest and not fitting else None
    order, refused, too_large = ranked(fitting), [], True
    kinds_of_mesh = {ranks_of(sections, p) > 1 for p in fitting}
    both = has_experts(sections.model) and not {f"mesh.{axis}" for axis in sections.experts.axes} & {*fixed_keys}
    experts = of_each_kind(sections, order) if both and kinds_of_mesh else None
    if compile_step is None:
        others = different(order[0], order) if order else ()
        return Found(order[0] if order else None, None, others, (), count, least, experts=experts)
    wrong: list[Exception] = []
    while order and len(refused) < finalists:
        best, *order = order
        log(f"plan {len(refused) + 1} of at most {finalists}: {overrides_text(best.candidate, fixed_keys)}")
        try:
            compiled = compile_step(best.candidate.applied(sections))
        except DoesNotFit as error:
            refused.append((best, str(error)))
            too_large &= error.memory
            if error.memory:
                order = [p for p in order if p.memory.total < (1 - MARGIN) * best.memory.total]
            else:  # its fault, which plans of the same kind will meet again
                order = [p for p in order if _kind(p) != _kind(best)]
            continue
        except (ValueError, Unsupported) as error:  # what a layer refuses of this plan, and of others perhaps not
            refused.append((best, str(error)))
            wrong.append(error)
            too_large = False
            continue
        if compiled is None or compiled.peak <= target.chip.memory:
            return Found(best, compiled, different(best, order), refused, count, least, experts=experts)
        refused.append((best, f"compiled, it takes {compiled.peak / 2**30:.1f} GiB"))
        times = compiled.peak / best.memory.total
        order = [p for p in order if p.memory.total * times <= target.chip.memory]
    if wrong and len(wrong) == len(refused):
        raise wrong[0]  # no plan is to blame, but a key that all have
    others = different(order[0], order) if order else ()
    return Found(None, None, others, refused, count, least, too_large=too_large)


def _kind(p: Predicted) -> tuple[str, bool]:
    return p.candidate.remat, p.candidate.accumulation > 1


def _explain(sections: Any, target: Target, fixed_keys: Collection[str], predictor: Predictor) -> None:
    """Raises ValueError that says why no plan is legal: what is wrong with the first candidate."""
    rows, parts = sections.data.global_batch, sections.accumulation
    if {BATCH, ACCUMULATION} <= set(fixed_keys) and rows % parts:
        raise ValueError(f"{BATCH} = {rows} must be a multiple of {ACCUMULATION} = {parts}")
    sizes, n = sections.mesh, target.slices
    if "mesh.dp" in fixed_keys and sizes.dp % n and sizes.dp != -1 and not sizes.fsdp_across_slices:
        raise ValueError(
            f"mesh.dp = {sizes.dp} must be a multiple of {n}: only dp crosses the network between {n} TPU slices"
        )
    for candidate in candidates(sections, target.count, fixed_keys):
        of = candidate.applied(sections)
        if (
            of.experts.overlaps(candidate.sizes, has_experts(of.model))
            and of.data.global_batch // of.accumulation // rows_over(candidate.sizes) < 2
        ):
            predictor.checked(candidate)  # whose message names the rows of a device
    others = candidates(sections, target.count, {*fixed_keys} - {BATCH})
    if BATCH in fixed_keys and any(predictor(candidate, 0.0) is not None for candidate in others):
        raise ValueError(
            f"{BATCH} = {rows} does not divide over any mesh of {target.count} devices that fits the model, the sequence and "
            f"the keys that are given; give a multiple of {target.count}, or leave {BATCH} open"
        )
    for candidate in candidates(sections, target.count, fixed_keys):
        predictor.checked(candidate)
    raise ValueError(f"no plan for {target.count} devices fits the given keys; leave one open")


def overrides_text(candidate: Candidate, given: Collection[str]) -> str:
    """Returns the overrides of a candidate that were not given, as a command line has them."""
    return " ".join(f"{name}={value}" for name, value in candidate.overrides().items() if name not in given)


def as_given(predictor: Predictor) -> Candidate:
    """Returns the recipe's own plan, on the devices of a target; a scheme and an order that it leaves open are those that a run
    would take. Raises ValueError where it leaves some devices idle."""
    sections, target = predictor.sections, predictor.target
    candidate = candidate_of(sections, mesh_shape(sections.mesh.sizes, target.count), *predictor.rows)
    if candidate.devices < target.count:
        raise ValueError(
            f"the mesh { {a: n for a, n in candidate.sizes.items() if n > 1} } has {candidate.devices} devices, and "
            f"{target.name} has {target.count}: make an axis larger, or -1 to use all devices, or plan for {candidate.devices}"
        )
    return predictor.as_a_run(candidate)
