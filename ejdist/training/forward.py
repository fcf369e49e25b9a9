"""The forward pass of a recipe on its mesh, for what is measured on batches: losses of tokens, and answers at a few places."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejdist.layout import replicated
from ejdist.models.model import StepContext
from ejdist.sequence.exchange import compiler_options
from ejdist.training.attended import text_indices
from ejdist.training.placing import local_rows, permuted, place_batch
from ejdist.training.program import Program, TrainSections, bind, make_program


def without_noise(sections: TrainSections) -> TrainSections:
    """Returns a recipe whose model computes what it does in use: without the router's jitter, which is for training."""
    experts: Any = getattr(sections.model, "experts", None)
    if not getattr(experts, "jitter", 0.0):
        return sections
    return replace(sections, model=replace(sections.model, experts=replace(experts, jitter=0.0)))


class Evaluator:
    """A recipe's model with its parameters, at one sequence length.

    Batches are NumPy int32 [data.global_batch, data.sequence_length] arrays in the order of the text, as `Data.batch` gives
    them, and all of their rows on every host. What is returned has that order too, is a NumPy array, and is the same on every
    host.
    """

    def __init__(
        self,
        sections: TrainSections,
        mesh: jax.sharding.Mesh,
        params: Any = None,
        buffers: Any = None,
        program: Program | None = None,
    ) -> None:
        """Args:
          params, buffers: of the model, with the shardings of the recipe's program. None: `use` gives them later.
          program: `make_program(sections, mesh)`, where it is there already.

        Raises:
          ValueError: a size does not fit the mesh, or the model has no such functions; names the key.
        """
        program = make_program(sections, mesh) if program is None else program
        self._program = program
        model, whole = self._program.model, replicated(mesh)
        if model.token_losses is None or model.logits_at is None:
            raise ValueError("this model does not return per-token losses and logits, so it cannot be evaluated")
        self.notes: list[str] = []
        ops = bind(sections, mesh, self._program.order, self.notes.append)
        self._state = (params, buffers)
        token_losses, logits_at = model.token_losses, model.logits_at

        options = compiler_options(mesh)

        @partial(jax.jit, out_shardings=whole, compiler_options=options)
        def losses(params: Any, buffers: Any, batch: dict[str, jax.Array]) -> jax.Array:
            return token_losses(params, batch, ops=ops, context=StepContext(buffers=buffers))

        @partial(jax.jit, static_argnames="count", out_shardings=whole, compiler_options=options)
        def answers(
            params: Any, buffers: Any, batch: dict[str, jax.Array], marks: jax.Array, tokens: jax.Array, count: int
        ) -> tuple[jax.Array, jax.Array]:
            context = StepContext(buffers=buffers)
            logits = logits_at(params, batch, marks, ops=ops, count=count, context=context)
            log_probabilities = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], axis=-1)[..., 0]
            return jnp.argmax(logits, axis=-1).astype(jnp.int32), log_probabilities

        self._losses: Callable[..., jax.Array] = losses
        self._lower_losses, self._answers = losses.lower, answers

    def use(self, params: Any, buffers: Any) -> None:
        """Replaces the parameters and buffers; None releases them."""
        self._state = (params, buffers)

    def compile_losses(self) -> None:
        """Compiles the losses of tokens ahead of time, so that the first batch does not."""
        state = self._program.state
        self._losses = self._lower_losses(state.params, state.buffers, self._program.batch).compile()

    @property
    def rows(self) -> int:
        """Rows of a batch."""
        return self._program.batch["tokens"].shape[0]

    @property
    def length(self) -> int:
        """Tokens of a row."""
        return self._program.batch["tokens"].shape[1]

    def token_losses(self, batch: dict[str, np.ndarray]) -> np.ndarray:
        """Returns the cross entropy of each token, float32 [rows, length], in nats; 0 where its target is -1."""
        losses = np.asarray(self._losses(*self._state, self._placed(batch)))
        index = text_indices(self._program, batch["segment_ids"])
        return np.asarray(self._program.order.inverse(losses, index=index))

    def answers(
        self, batch: dict[str, np.ndarray], marks: np.ndarray, given: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns (the most likely next token, the log-probability of the given one), [rows, n] each.

        Args:
          marks: int32 [rows, length]: i at the token after which answer i comes, -1 elsewhere.
          given: int32 [rows, n], the answers.
        """
        # The marks travel with the tokens they are at, whatever the order.
        placed = self._placed(batch)
        where = self._placed(batch | {"targets": marks})["targets"]
        best, log_probabilities = self._answers(*self._state, placed, where, given, count=given.shape[1])
        return np.asarray(best), np.asarray(log_probabilities)

    def _placed(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        rows = local_rows(self._program)
        mine = permuted({name: x[rows] for name, x in batch.items()}, self._program)
        return place_batch(mine, self._program, rows)
