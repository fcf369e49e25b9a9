"""Texts that a model writes while it trains: the same prompts at every evaluation, each answered by the most likely tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ejdist.generation import Engine
from ejdist.training.chats.special_tokens import begun
from ejdist.training.program import Program, TrainSections


class Samples:
    """The prompts of `evaluation.samples`. Between evaluations it holds no memory of the devices."""

    def __init__(self, sections: TrainSections, program: Program, tokenizer: Any) -> None:
        """Raises ValueError: the model cannot generate, or a prompt has no tokens; names the key."""
        asked = sections.evaluation
        self._prompts = {prompt: begun(tokenizer, tokenizer.encode(prompt)) for prompt in asked.samples}
        self._tokens, longest = asked.sample_tokens, max(map(len, self._prompts.values()))
        try:
            self._engine = Engine(
                program.model,
                None,
                mesh=program.mesh,
                slots=len(self._prompts),
                length=longest + self._tokens,
                chunk=longest,
                ends=tokenizer.stop_ids,
                decode=tokenizer.decode,
                platform=sections.platform,
                experts=vars(sections.experts),
            )
        except ValueError as error:
            raise ValueError(f"evaluation.samples: {error}") from error

    def write(self, params: Any, buffers: Any, alive: Callable[[], None]) -> list[dict[str, str]]:
        """Returns a row {"prompt", "text"} for each prompt. Call it on all hosts. `alive` is called before each step."""
        self._engine.use(params, buffers)
        try:
            numbers = {
                self._engine.submit(ids, max_tokens=self._tokens, temperature=0): prompt
                for prompt, ids in self._prompts.items()
            }
            while not self._engine.idle:
                alive()
                self._engine.step()
            results = self._engine.results()
        finally:
            self._engine.release()
        return [{"prompt": prompt, "text": results[number].text or ""} for number, prompt in numbers.items()]
