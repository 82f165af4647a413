"""The step loop, on its own thread: schedule -> run -> sample -> publish.

The engine decides nothing about memory. It computes the turns it was given, in the slots it
was given, and after each step hands one report to `on_step` (called on the engine thread).
Commands arrive through an inbox and take effect at the next step boundary, so a turn's slots
are never touched again once a report said that it stopped.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from kvstore.types import StepReport, StopReason, TurnId, TurnProgress, TurnSpec
from models.contention import Contention
from models.detokenize import Detokenizer, special_ids
from models.logprobs import TokenLogprob, logprobs_of
from models.runner import Chunk, Runner
from models.sampling import SamplingParams, SamplingRow, sample
from models.scheduler import schedule

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor

    from models.grammar import Matcher

log = logging.getLogger(__name__)


class Answer:
    """One turn while the engine has it, and while it is suspended.

    tokens[0, num_computed) have K/V in `slots`; tokens[num_computed, len) are pending: the rest
    of the prompt, or the token sampled last.
    """

    def __init__(
        self, turn: TurnId, spec: TurnSpec, detokenizer: Detokenizer, eos_ids: frozenset[int], max_tokens: int
    ) -> None:
        assert isinstance(spec.payload, SamplingParams)
        self.turn = turn
        self.tenant = spec.tenant
        self.params = spec.payload
        self.tokens = array("I", spec.token_ids)
        self.slots: list[int] = []
        self.num_computed = 0
        self.detokenizer = detokenizer
        self._num_prompt = len(self.tokens)
        self._num_most = min(self._num_prompt + spec.max_new_tokens, max_tokens)
        self._ending_ids = self.params.stop_token_ids | (frozenset() if self.params.ignore_eos else eos_ids)
        self._block_tokens = 0
        self._notes: list[TokenLogprob] = []  # on output tokens, the first `_notes_given` of which were published
        self._notes_given = 0
        self._prompt_noted = 1  # prompt tokens [1, here) have their notes; nothing says how likely the first was
        self._matcher = None if self.params.grammar is None else self.params.grammar.matcher()
        self.ended: StopReason | None = None
        self.error: str | None = None

    def place(self, cached_tokens: int, slots: Sequence[int], block_tokens: int) -> None:
        """Continue from `cached_tokens` in a new block table."""
        self.slots = list(slots)
        self.num_computed = cached_tokens
        self._block_tokens = block_tokens

    @property
    def num_pending(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def num_writable(self) -> int:
        return len(self.slots) * self._block_tokens - self.num_computed

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self._num_prompt

    @property
    def samples(self) -> bool:
        """Whether a token is wanted once everything pending is computed."""
        return len(self.tokens) < self._num_most

    def chunk(self, count: int) -> Chunk:
        """The next `count` pending tokens."""
        stop = self.num_computed + count
        wants_logits = count == self.num_pending and self.samples
        wants_all = self.params.prompt_logprobs and self.num_computed < self._num_prompt
        return Chunk(self.tokens[self.num_computed : stop], self.num_computed, self.slots, wants_logits, wants_all)

    def sampling_row(self) -> SamplingRow:
        return SamplingRow(self.params, len(self.tokens), self.num_output, self.tokens, self._ending_ids, self._matcher)

    def append(self, token_id: int) -> str:
        """Take the sampled token; return the text it makes visible and note whether the answer has ended."""
        self.tokens.append(token_id)
        if self._matcher is not None and self._follows(self._matcher, token_id):
            return ""
        if token_id in self._ending_ids:
            self.ended = StopReason.STOP
            return self.detokenizer.flush()
        text = self.detokenizer.step(token_id)
        if self.detokenizer.stopped:
            self.ended = StopReason.STOP
        elif self._matcher is not None and self._matcher.is_over and self.params.ignore_eos:
            self.ended = StopReason.STOP  # the end that is ignored is all that could come
            text += self.detokenizer.flush()
        elif not self.samples:
            self.ended = StopReason.LENGTH
            text += self.detokenizer.flush()
        return text

    def _follows(self, matcher: Matcher, token_id: int) -> bool:
        """Go on in the grammar; True where it cannot be kept to, which fails the turn."""
        if not matcher.is_lost and token_id not in self._ending_ids:
            matcher.take(token_id)
        if not matcher.is_lost:
            return False
        self.ended = StopReason.FAILED
        self.error = "the answer could not be held to its grammar"
        return True

    def note(self, note: TokenLogprob) -> None:
        """Keep what is to be told of the token appended last."""
        self._notes.append(note)

    def take_notes(self) -> list[object]:
        """Notes on tokens whose text is out and that were not taken yet: they show no part of a stop string."""
        start, self._notes_given = self._notes_given, max(self._notes_given, self.detokenizer.kept.num_tokens)
        return list(self._notes[start : self._notes_given])

    def prompt_notes(self, chunk: Chunk, logits: Tensor) -> list[object]:
        """Notes on prompt tokens, from the logits before each; a resumed turn says nothing twice."""
        first = max(chunk.position + 1, self._prompt_noted)
        stop = min(chunk.position + len(chunk.token_ids) + 1, self._num_prompt)
        if stop <= first:
            return []
        self._prompt_noted = stop
        rows = logits[first - 1 - chunk.position : stop - 1 - chunk.position]
        return list(
            logprobs_of(rows, self.tokens[first:stop].tolist(), [self.params.top_logprobs or 0] * (stop - first))
        )

    @property
    def num_kept(self) -> int:
        """Output ids that are history: seen whole by the client, and the id that ended the turn."""
        kept = self.detokenizer.kept.num_tokens
        ended_by_id = self.ended is StopReason.STOP and not self.detokenizer.stopped
        return kept + (ended_by_id and kept == self.num_output - 1)


@dataclass(frozen=True, slots=True)
class _Start:
    turn: TurnId
    spec: TurnSpec
    cached_tokens: int
    slots: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Extend:
    turn: TurnId
    slots: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Resume:
    turn: TurnId
    cached_tokens: int
    slots: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Stop:
    turn: TurnId
    reason: StopReason


class _Close:
    pass


_Command = _Start | _Extend | _Resume | _Stop | _Close


Choose = Callable[["Tensor", Sequence[SamplingRow]], list[int]]
"""Logits [rows, vocabulary] and their rows -> one id each, as `sample` does."""


class Engine:
    """Owns the engine thread. `on_step` gets every report, on that thread.

    `choose` is another way of sampling, for tests that need the model to say certain words; nothing
    that comes over HTTP reaches it.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        eos_ids: frozenset[int],
        *,
        max_context: int,
        prefill_chunk_tokens: int,
        on_step: Callable[[StepReport], None],
        choose: Choose = sample,
    ) -> None:
        self._choose = choose
        self._runner = runner
        self._tokenizer = tokenizer
        self._special_ids = special_ids(tokenizer)
        self._eos_ids = eos_ids
        self._max_context = max_context
        self._prefill_chunk_tokens = prefill_chunk_tokens
        self._contention = Contention()
        self._on_step = on_step
        self._inbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._running: dict[TurnId, Answer] = {}
        self._suspended: dict[TurnId, Answer] = {}
        self._stopped: list[TurnProgress] = []  # by command, not yet reported
        self._is_closing = False
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)

    # --- commands: thread-safe, return at once (kvstore.types.TurnEngine) -------------------

    def start(self, turn: TurnId, spec: TurnSpec, cached_tokens: int, slots: Sequence[int]) -> None:
        """Begin computing `turn` at token `cached_tokens`."""
        self._inbox.put(_Start(turn, spec, cached_tokens, slots))

    def extend(self, turn: TurnId, slots: Sequence[int]) -> None:
        """Append slots to the turn's block table."""
        self._inbox.put(_Extend(turn, slots))

    def resume(self, turn: TurnId, cached_tokens: int, slots: Sequence[int]) -> None:
        """Continue a suspended turn."""
        self._inbox.put(_Resume(turn, cached_tokens, slots))

    def stop(self, turn: TurnId, reason: StopReason) -> None:
        """Leave `turn` out from the next step on."""
        self._inbox.put(_Stop(turn, reason))

    def open(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread after the step it is in; blocking. Turns still running get no report."""
        self._inbox.put(_Close())
        if self._thread.is_alive():
            self._thread.join()

    @property
    def is_busy(self) -> bool:
        """Is there anything to compute? To be asked from any thread."""
        return bool(self._running)

    # --- the loop ---------------------------------------------------------------------------

    def _loop(self) -> None:
        while not self._is_closing:
            plan = self._plan()
            if not self._inbox.empty() or not (plan or self._stopped):
                self._obey(self._inbox.get())
                continue
            report = self._step(plan)
            report.progress.extend(self._stopped)
            self._stopped.clear()
            self._on_step(report)

    def _obey(self, command: _Command) -> None:
        """Carry out `command`; if that raises it is its turn that fails, not the thread all turns wait for."""
        try:
            self._carry_out(command)
        except Exception as error:
            log.exception("%s failed", type(command).__name__)
            if isinstance(command, _Close):
                return
            self._running.pop(command.turn, None)
            self._suspended.pop(command.turn, None)
            reason = f"{type(error).__name__}: {error}"
            self._stopped.append(TurnProgress(command.turn, 0, stopped=StopReason.FAILED, error=reason))

    def _carry_out(self, command: _Command) -> None:
        match command:
            case _Start(turn, spec, cached_tokens, slots):
                detokenizer = self._detokenizer(spec)
                answer = Answer(turn, spec, detokenizer, self._eos_ids, self._max_context)
                self._place(answer, cached_tokens, slots)
            case _Extend(turn, slots):
                if turn in self._running:
                    self._runner.clear(slots)
                    self._running[turn].slots.extend(slots)
            case _Resume(turn, cached_tokens, slots):
                self._place(self._suspended.pop(turn), cached_tokens, slots)
            case _Stop(turn, reason):
                self._stop(turn, reason)
            case _Close():
                self._is_closing = True

    def _place(self, answer: Answer, cached_tokens: int, slots: Sequence[int]) -> None:
        layout = self._runner.layout
        self._runner.clear(slots[layout.blocks_for(cached_tokens) :])
        answer.place(cached_tokens, slots, layout.block_tokens)
        self._running[answer.turn] = answer

    def _stop(self, turn: TurnId, reason: StopReason) -> None:
        if turn not in self._running:
            self._suspended.pop(turn, None)
            return
        answer = self._running.pop(turn)
        if reason is StopReason.SUSPENDED:
            self._suspended[turn] = answer
        text = "" if reason is StopReason.SUSPENDED else answer.detokenizer.flush()
        progress = TurnProgress(turn, answer.num_computed, text=text, stopped=reason, kept_tokens=answer.num_kept)
        progress.notes = answer.take_notes()
        self._stopped.append(progress)

    def _detokenizer(self, spec: TurnSpec) -> Detokenizer:
        params = spec.payload
        assert isinstance(params, SamplingParams)
        return Detokenizer(
            self._tokenizer,
            self._special_ids,
            stop=params.stop,
            min_tokens=params.min_tokens,
            prefix_ids=spec.token_ids[-8:].tolist(),
            visible={token_id: self._tokenizer.id_to_token(token_id) or "" for token_id in params.visible_ids},
        )

    def _plan(self) -> list[tuple[Answer, int]]:
        answers = list(self._running.values())
        works = schedule(answers, self._prefill_chunk_tokens, self._contention)
        return [(answers[work.place], work.num_tokens) for work in works]

    def _step(self, plan: list[tuple[Answer, int]]) -> StepReport:
        report = StepReport(progress=[])
        if not plan:
            return report
        started = time.perf_counter()
        try:
            chunks = [answer.chunk(count) for answer, count in plan]
            logits = self._runner.run(chunks)
            self._publish(plan, chunks, logits, report)
        except Exception as error:
            # The engine outlives any one step: its turns fail, with the reason in the log.
            log.exception("a step over %d turns failed", len(plan))
            report.progress = [self._failed(answer, error) for answer, _ in plan]
        report.seconds = time.perf_counter() - started
        for answer, count in plan:
            if count == 1:
                report.decode_tokens += 1
            else:
                report.prefill_tokens += count
            if answer.ended is not None:
                del self._running[answer.turn]
        return report

    def _publish(self, plan: list[tuple[Answer, int]], chunks: list[Chunk], logits: Tensor, report: StepReport) -> None:
        ends = list(accumulate(chunk.num_logits for chunk in chunks))
        sampled = [
            (answer, end - 1) for (answer, _), chunk, end in zip(plan, chunks, ends, strict=True) if chunk.wants_logits
        ]
        last = logits if len(sampled) == len(logits) else logits[[row for _, row in sampled]]
        token_ids = self._sampled([answer for answer, _ in sampled], last)
        for (answer, count), chunk, end in zip(plan, chunks, ends, strict=True):
            progress = TurnProgress(answer.turn, answer.num_computed + count)
            if chunk.wants_all_logits:
                progress.prompt_notes = answer.prompt_notes(chunk, logits[end - chunk.num_logits : end])
            answer.num_computed += count
            token_id = token_ids.get(answer.turn)
            if token_id is not None:
                progress.text = answer.append(token_id)
                progress.new_token_ids.append(token_id)
                progress.notes = answer.take_notes()
            elif answer.num_pending == 0:
                answer.ended = StopReason.LENGTH  # nothing was to be generated: the prompt is stored
            if answer.ended is not None:
                progress.stopped, progress.kept_tokens, progress.error = answer.ended, answer.num_kept, answer.error
                progress.stop_string = answer.detokenizer.stop_string
            report.progress.append(progress)

    def _sampled(self, answers: list[Answer], logits: Tensor) -> dict[TurnId, int]:
        """The next token of each answer; `logits` [answers, vocabulary]."""
        token_ids = self._choose(logits, [answer.sampling_row() for answer in answers])
        telling = [i for i, answer in enumerate(answers) if answer.params.top_logprobs is not None]
        if telling:
            top = [answers[i].params.top_logprobs or 0 for i in telling]
            notes = logprobs_of(logits[telling], [token_ids[i] for i in telling], top)
            for i, note in zip(telling, notes, strict=True):
                answers[i].note(note)
        return {answer.turn: token_id for answer, token_id in zip(answers, token_ids, strict=True)}

    @staticmethod
    def _failed(answer: Answer, error: Exception) -> TurnProgress:
        answer.ended = StopReason.FAILED
        return TurnProgress(answer.turn, 0, stopped=StopReason.FAILED, error=f"{type(error).__name__}: {error}")
