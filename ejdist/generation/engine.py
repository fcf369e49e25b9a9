"""Generates text for many requests at once: continuous batching over pages and states, in programs of fixed shapes.

A step runs at most two programs of the model, each compiled once: one for a chunk of prompts, one for a token of every text in
progress. Which request a row belongs to and its length are data. A small program after each chooses the tokens: one for
steps of most likely tokens, one for those that draw, one for those with limits. A request waits until a slot and the pages for
all of its tokens are free, so every request that starts also finishes. The result of a request does not depend on the others in
the batch, except for the order of sums. A step takes the tokens of the one before from the device's memory, and starts before
the host has read them.

Source: Yu et al., Orca: A Distributed Serving System for Transformer-Based Generative Models, 2022 (continuous batching); Kwon
et al., Efficient Memory Management for Large Language Model Serving with PagedAttention, 2023; Agrawal et al., SARATHI, 2023
(prompts in chunks).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejdist.generation.pages import Pages, arrays_of, bytes_on_device, check_count, ranks_of
from ejdist.generation.requests import Request, Result, Token, ids_of, stops_of
from ejdist.generation.rows import Rows, positions_of
from ejdist.generation.sampling import Choices, Sampling, sample
from ejdist.generation.served import Step
from ejdist.layout import current_layout, replicated, set_layout, sharding
from ejdist.models.kept import Arrays, Cached
from ejdist.models.model import Model
from ejdist.models.packing import Packing
from ejdist.operations import bind_ops
from ejdist.packed import check_format
from ejdist.sequence.exchange import compiler_options
from kernels.framework.target import in_cuda_graphs


class Engine:
    """Generates with a model, on the mesh and with the parameters of its training.

    A step reads every matrix once and moves none: of the layers the engine has copies, each matrix an array of its own in the
    compute dtype, sharded as in training.

    >>> engine = Engine(model, params, slots=8, length=2048)  # doctest: +SKIP
    >>> number = engine.submit(ids, max_tokens=100, temperature=0)  # doctest: +SKIP
    >>> while not engine.idle:  # doctest: +SKIP
    ...     for token in engine.step():
    ...         print(token)
    >>> engine.results()[number].tokens  # doctest: +SKIP

    With several hosts, make the same calls on each.

    Attributes:
      cache_bytes: of pages and states, on each device.
    """

    def __init__(
        self,
        model: Model,
        params: Any,
        *,
        buffers: Any = None,
        mesh: jax.sharding.Mesh | None = None,
        slots: int = 8,
        length: int = 2048,
        page: int = 16,
        pages: int | None = None,
        chunk: int = 128,
        ends: Collection[int] = (),
        decode: Callable[[Sequence[int]], str] | None = None,
        donate: bool = False,
        cache: str = "whole",
        weights: str | None = None,
        platform: str | None = None,
        experts: Mapping[str, Any] | None = None,
    ) -> None:
        """Args:
          model: what `build()` of a recipe's model section returns.
          params, buffers: of the model, sharded as in training; None: call `use` before the first step.
          mesh: that of the parameters; None for one device. Rows of a step are split over all axes that split rows or sequences
            in training, and heads over the axes of heads. `cache` says which pages a device holds, of its own heads.
          slots: most requests in progress at once; rounded up to a multiple of the devices that rows are split over.
          length: most tokens of a request, prompt and generated text together.
          page: tokens per page. pages: number of pages, of all devices together where they are spread; default: enough for
            `slots` requests of `length`.
          chunk: prompt tokens per step.
          ends: tokens that end a text.
          decode: ids -> text, for `stop` and for the text of results.
          donate: take the parameters over: each stack is deleted once its rows are copied, so that they take memory once. Else
            the caller's tree stays as it is, beside the copies.
          cache: "whole": every device holds the pages of all requests; "spread": the pages of each are spread over the axes
            that split a sequence in training, so that n devices hold n times the tokens.
          weights: "int8", "int4", "nf4", "mxfp4" or "mxfp8": the format that the layers' matrices are packed in when parameters
            are taken; `packing` then says which are, and why others are not. None: the compute dtype.
          platform, experts: see `bind_ops`.

        Raises:
          ValueError: the model cannot generate (names the layer), a size is below 1, nothing splits a sequence over which a
            cache could be spread (names the argument), or no matrix can be packed so.
        """
        for name, size in (
            ("slots", slots),
            ("length", length),
            ("page", page),
            ("chunk", chunk),
            ("pages", pages or 1),
        ):
            if size < 1:
                raise ValueError(f"Engine: argument {name!r} must be at least 1, got {size}")
        check_format("Engine: argument 'weights'", weights)
        self._cached, self._form = _cached(model, experts), weights
        layout = current_layout()
        table = dict(layout.activations)
        whole = table.pop("replicated", ())
        sequence = {*table.pop("T", ()), *table.pop("S", ())}
        table["B"] = (*table.get("B", ()), *(a for a in sorted(sequence) if a not in table.get("B", ())))
        kept = [k for _, of in self._cached.declared.values() for k in of.values()]
        ranks = ranks_of(cache, layout.activations.get("T", ()), mesh, any(k.per_token for k in kept))
        if ranks > 1:
            table["pages"] = layout.activations["T"]
        self._layout = partial(set_layout, parameters=layout.parameters, replicated=whole, **table)
        self.groups = 1 if mesh is None else math.prod(mesh.shape.get(a, 1) for a in table["B"])
        self.slots, self.length, self.chunk = -(-slots // self.groups) * self.groups, length, chunk
        longest = -(-length // page)
        each = -(-(self.slots * ranks * -(-longest // ranks) if pages is None else pages) // ranks)
        run = min(-(-longest // ranks), each)  # the pages of a request on a rank
        self._longest = ranks * run
        check_count(self._cached.declared, ranks * each, page)
        self._pages = Pages(ranks * each, page, all(k.per_token for k in kept), ranks, run)
        self._ends, self._decode = frozenset(ends), decode
        self._ops = bind_ops(mesh, platform=platform, experts=experts)
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._free = list(range(self.slots))[::-1]
        self._tables = np.zeros((self.slots, self._longest), np.int32)  # the pages of the request in each slot
        self._sent: jax.Array | None = None  # the same on the devices; None where it has changed
        # Steps whose tokens are not read yet.
        self._started: list[tuple[list[Request | None], jax.Array, jax.Array]] = []
        self._finished: dict[int, Result] = {}
        self._next = 0
        self._compile(mesh)
        self.packing: Packing | None = None
        self._weights = None if params is None else self._taken(params, buffers, donate)

    def _compile(self, mesh: jax.sharding.Mesh | None) -> None:
        """Sets up the arrays that layers keep between steps, and the program of a step."""
        page = self._pages.page
        with self._layout():
            activations = current_layout().activations
        arrays, places = {}, {}
        for part, (layers, kept) in self._cached.declared.items():
            arrays[part], places[part] = {}, {}
            for name, k in kept.items():
                of = arrays_of(k, layers, self.slots, self._pages, self._cached.dtype)
                arrays[part][name] = tuple(jax.ShapeDtypeStruct(shape, kind) for shape, _, kind in of)
                places[part][name] = tuple(
                    None if mesh is None else sharding(mesh, dims, activations, shape=shape, what=f"what {part} keeps")
                    for shape, dims, _ in of
                )
        placed = None if mesh is None else places
        self.cache_bytes = bytes_on_device(arrays, placed)
        whole = None if mesh is None else replicated(mesh)
        # The token of each slot, which the next step of its text takes.
        last = jax.ShapeDtypeStruct((self.slots,), np.int32)

        def empty() -> tuple[Arrays, jax.Array]:
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (arrays, last))

        self._empty = jax.jit(empty, out_shardings=(placed, whole))
        self._kept: tuple[Arrays, jax.Array] | None = None  # until the first step
        cached, ops = self._cached, self._ops

        def step(
            weights: Any, kept: Arrays, last: jax.Array, tables: jax.Array, asked: jax.Array
        ) -> tuple[jax.Array, Arrays]:
            tokens, (slots, before, new) = asked[:, :-3], asked[:, -3:].T
            width = tokens.shape[1]
            tokens = jnp.where(tokens < 0, last.at[slots].get(mode="clip")[:, None], tokens)
            positions = positions_of(before, new, width)
            rows = Rows.of(tables.at[slots].get(mode="clip"), slots, before, new, width, page)
            batch = {
                "tokens": tokens,
                "positions": jnp.maximum(positions, 0),
                "segment_ids": jnp.where(positions >= 0, 0, -1),
            }
            with self._layout():
                logits, kept = cached.step(weights, batch, kept, ops, Step(cached.declared, rows))
                # Where the output projection is split, its logits travel, and not the matrix.
                return ops.constrain(ops.constrain(logits, "B V"), "_ _"), kept

        def choose(
            logits: jax.Array, last: jax.Array, slots: jax.Array, choices: Choices | None
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            chosen, scores = sample(logits, choices)
            return chosen, scores, last.at[slots].set(chosen, mode="drop")

        options = None if mesh is None else compiler_options(mesh)
        self._step = jax.jit(step, donate_argnums=1, out_shardings=(whole, placed), compiler_options=options)
        self._choose = jax.jit(choose, donate_argnums=1, out_shardings=whole)
        self._everywhere = jax.jit(lambda x: x, out_shardings=whole)

    def use(self, params: Any, buffers: Any = None, *, donate: bool = False) -> None:
        """Replaces the parameters and buffers by others of the same shapes and shardings; `donate` as above. Texts in progress
        keep the cache of their earlier tokens; new requests share none of it."""
        self._weights = None  # before there are others
        self._weights = self._taken(params, buffers, donate)
        self._pages.forget()
        for request in (*self._running, *self._waiting):
            request.digests = []

    def _taken(self, params: Any, buffers: Any, donate: bool) -> Any:
        if self._form is not None:
            with self._layout():
                self.packing = self._cached.packing(params, buffers, self._form)
        return self._cached.apart(params, buffers, donate=donate, packing=self.packing)

    @property
    def weight_bytes(self) -> int:
        """The bytes of the parameters and buffers as the engine has them, over all devices."""
        return sum(x.nbytes for x in jax.tree.leaves(self._weights))

    def release(self) -> None:
        """Frees the cache and the parameters, and drops all unfinished requests. Call `use` before the next step."""
        for request in [*self._running]:
            self._end(request)
        self._waiting.clear()
        self._started.clear()
        self._pages.forget()
        self._kept = self._weights = None

    def submit(
        self,
        prompt: Any,
        *,
        max_tokens: int | None = None,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        stop: str | Sequence[str] = (),
    ) -> int:
        """Returns the number of a new request.

        Args:
          prompt: token ids, at least one.
          max_tokens: most tokens to generate; default: as many as fit.
          temperature, top_k, top_p, min_p, seed: see `Sampling`.
          stop: strings; the text ends at the first one. They need the engine's `decode`.

        Raises:
          ValueError: the prompt is empty, too long or from another tokenizer, or an argument is wrong. Other requests continue.
        """
        sampling = Sampling(temperature, top_k, top_p, min_p, seed)
        ids, stops = ids_of(prompt, self._cached.vocab_size), stops_of(stop)
        if stops and self._decode is None:
            raise ValueError("argument 'stop' needs an Engine with decode=, a function from ids to text")
        room = min(self.length, self._longest * self._pages.page)
        if max_tokens is None:
            max_tokens = max(room - len(ids), 1)
        if max_tokens < 1:
            raise ValueError(f"max_tokens = {max_tokens} must be at least 1")
        if len(ids) + max_tokens > room:
            raise ValueError(
                f"a prompt of {len(ids)} tokens and max_tokens = {max_tokens} exceed the {room} tokens of a request: "
                "shorten one of them, or raise length, or pages of an Engine"
            )
        request = Request(self._next, ids, max_tokens, sampling, stops, self._pages.digests(ids))
        self._next += 1
        self._waiting.append(request)
        return request.id

    @property
    def programs(self) -> int:
        """The number of compiled programs of the model: at most two, whatever the requests."""
        return self._step._cache_size()  # pyrefly: ignore[missing-attribute]

    @property
    def idle(self) -> bool:
        """Whether no request is waiting or in progress."""
        return not self._waiting and not self._running

    def results(self) -> dict[int, Result]:
        """Returns request number -> text, for the texts that finished since the last call."""
        finished, self._finished = self._finished, {}
        return finished

    def step(self) -> list[Token]:
        """Starts a chunk of the prompts that are not cached yet, and a token of every other text, and returns the tokens of the
        step before: devices compute while the host reads and prepares."""
        self._admit()
        before, self._started = self._started, []
        filling = [r for r in self._running if r.filled < len(r.prompt)][: self.groups]
        if filling:
            self._start(filling, self.groups, self.chunk)
        writing = [r for r in self._running if r.filled == len(r.prompt) and r.begun < r.max_tokens]
        if writing:
            self._start(writing, self.slots, 1)
        return [token for step in before for token in self._read(*step)]

    def _admit(self) -> None:
        """Gives slots and pages to waiting requests, in order."""
        while self._waiting and self._free:
            request = self._waiting[0]
            needed = -(-(len(request.prompt) + request.max_tokens) // self._pages.page)
            if needed > self._pages.room:
                return
            request.pages, request.slot = self._pages.take(needed), self._free.pop()
            self._tables[request.slot, :needed] = request.pages
            self._running.append(self._waiting.popleft())

    def _begin(self, request: Request) -> None:
        """Replaces the first pages of a request by cached ones of the same tokens. The devices have its table from then on."""
        shared = self._pages.shared(request.digests)
        self._pages.release(request.pages[: len(shared)])
        request.pages[: len(shared)] = self._tables[request.slot, : len(shared)] = shared
        request.filled, request.published = len(shared) * self._pages.page, len(shared)
        self._sent = None

    def _start(self, requests: list[Request], rows: int, width: int) -> None:
        """Starts a step of requests: of their next tokens, at most `width` of each."""
        asked = np.zeros((rows, width + 3), np.int32)  # tokens, slot, tokens before, and how many are new
        asked[:, -3] = self.slots
        choices = [(Sampling(temperature=0), 0)] * rows
        writing: list[Request | None] = []  # None: a prompt that goes on
        for i, r in enumerate(requests):
            choices[i] = r.sampling, r.begun
            if r.filled < len(r.prompt):
                if not r.filled:
                    self._begin(r)
                ids, before = r.prompt[r.filled : r.filled + width], r.filled
                r.filled += len(ids)
                self._publish(r)
            else:
                ids, before = [-1], len(r.prompt) + r.begun - 1  # the last token of the slot
            asked[i, width - len(ids) :] = *ids, r.slot, before, len(ids)
            writes = r.filled == len(r.prompt)
            r.begun += writes
            writing.append(r if writes else None)
        kept, last = self._empty() if self._kept is None else self._kept
        if self._sent is None:
            self._sent = self._everywhere(self._tables.copy())
        # The jitted function and not what it compiled, which checks each array of the weights in Python in every step.
        with in_cuda_graphs():  # of hundreds of kernels, of which the host starts some too late
            logits, kept = self._step(self._weights, kept, last, self._sent, asked)
        chosen, scores, last = self._choose(logits, last, asked[:, -3], Choices.of(choices))
        self._kept = kept, last
        self._started.append((writing, chosen, scores))

    def _read(self, requests: list[Request | None], chosen: jax.Array, scores: jax.Array) -> list[Token]:
        """Returns the tokens of a step that has started. A text that ended with the token before gets none."""
        if not any(requests):
            return []
        events = []
        for r, token, score in zip(requests, np.asarray(chosen).tolist(), np.asarray(scores).tolist(), strict=False):
            if r is None or r.slot < 0:
                continue
            reason = r.take(token, score, self._ends, self._decode)
            events.append(Token(r.id, token, score, reason))
            if reason is not None:
                self._finish(r, reason)
        return events

    def _publish(self, request: Request) -> None:
        full = min(request.filled // self._pages.page, len(request.digests))
        for i in range(request.published, full):
            self._pages.publish(request.pages[i], request.digests[i])
        request.published = full

    def _end(self, request: Request) -> None:
        self._running.remove(request)
        self._pages.release(request.pages)
        self._free.append(request.slot)
        request.slot = -1

    def _finish(self, request: Request, reason: str) -> None:
        self._end(request)
        self._finished[request.id] = request.result(reason, self._decode)


def _cached(model: Any, experts: Mapping[str, Any] | None) -> Cached:
    """Returns the model's form for generation. Raises ValueError if it has none, with what to use instead."""
    cached = getattr(model, "cached", None)
    if cached is None:
        raise ValueError("Engine: this model has no form for generation (Model.cached); use a decoder of ejdist.models")
    if cached.refused:
        raise ValueError(cached.refused)
    if (capacity := (experts or {}).get("capacity")) is not None:
        raise ValueError(
            f"experts.capacity = {capacity} drops tokens depending on the others in the batch, so a text would depend "
            "on other requests: use experts.capacity=null to generate"
        )
    return cached
