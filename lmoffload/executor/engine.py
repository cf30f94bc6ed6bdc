"""The engine: a plan opened, and the jobs it runs."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from lmoffload.executor import garbage, process
from lmoffload.executor.block import BlockRunner
from lmoffload.executor.checks import check_bytes, check_kernels, check_room, check_rows
from lmoffload.executor.device_batch import DeviceBatch
from lmoffload.executor.device_runner import DeviceParts, DeviceRunner
from lmoffload.executor.device_side import DeviceSide
from lmoffload.executor.mean_squares import MeanSquares
from lmoffload.executor.meter import Meter, merged
from lmoffload.executor.micro_batch import MicroBatch
from lmoffload.executor.pace import Pace
from lmoffload.executor.reader import DiskReader
from lmoffload.executor.reporting import run_report
from lmoffload.executor.request import Completion, Progress, Request, Score
from lmoffload.executor.resources import Accelerator
from lmoffload.executor.row import Row, make_row, scored_row
from lmoffload.executor.sampling import stop_token_ids
from lmoffload.executor.stage import bind_model
from lmoffload.executor.stored_weights import StoredWeights
from lmoffload.executor.waiting import Waiting
from lmoffload.executor.weights import WeightStore
from lmoffload.executor.working import touch_working
from lmoffload.kernels.decode_attention import compile_for
from lmoffload.kernels.pool import Pool
from lmoffload.kernels.processor import HostProcessor, Processor
from lmoffload.modeling.build import build_model
from lmoffload.modeling.rotary import follows_length, switches_at
from lmoffload.settings import Settings
from lmoffload_solver.counting import main_format
from lmoffload_solver.errors import StatedError
from lmoffload_solver.plan import Plan
from lmoffload_solver.report import RunReport
from lmoffload_solver.schedule import units_of
from lmoffload_solver.soundness import check_plan

if TYPE_CHECKING:
    from lmoffload.checkpoint import Checkpoint, StoreProgress

class Engine:
    """Runs one plan on one checkpoint.

    Args:
        checkpoint: the opened model.
        plan: made for this model.
        decode: text of token ids, needed for stop strings.
        tokenizer_eos: the tokenizer's end token, used where neither the generation configuration nor the model's names one.
        keep_spans: keep begin and end of every task of the first block (`meter.spans`).
        on_store: called while weights are quantized that the plan wants in another format than the checkpoint's, after every tensor.
        cache: where quantized weights lie; the user's cache directory by default.
        accelerators: for a plan with a device, to be used and closed; by default those that the plan is for.

    Raises:
        StatedError: the plan is of another model, or does not hold on it; or weights cannot be quantized.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        plan: Plan,
        *,
        decode: Callable[[Sequence[int]], str] | None = None,
        tokenizer_eos: int | None = None,
        keep_spans: bool = False,
        on_store: Callable[[StoreProgress], None] = lambda progress: None,
        cache: Path | None = None,
        accelerators: Sequence[Accelerator] = (),
    ) -> None:
        from lmoffload.checkpoint import transformers_config, with_formats

        if plan.model.digest != checkpoint.fingerprint:
            raise StatedError(f"The plan was made for the model {plan.model.name!r}, not for {checkpoint.shape.name!r}: make a new plan.")
        self._torch_threads = torch.get_num_threads()
        check_plan(checkpoint.shape, plan)
        check_kernels(plan)
        torch.set_num_threads(1)  # parallelism is the pool's; serial torch gives every row the same bits in any batch
        process.reset_peak()
        formats = {name: tensor.format for name, tensor in plan.weights.tensors.items()}
        stored_format = main_format(checkpoint.shape)
        checkpoint = with_formats(checkpoint, formats, cache=cache, on_progress=on_store)
        self.plan, self.shape = plan, checkpoint.shape
        self._bytes_read_before = process.bytes_read_from_disk()
        self._generation = dict(checkpoint.generation_config or {})
        self._stop_ids = stop_token_ids(self._generation, checkpoint.config, tokenizer_eos)
        self._decode = decode
        self.meter = Meter(keep_spans=keep_spans)
        self.remarks: list[str] = []
        self._device = DeviceSide.of(self.shape, plan, stored_format, accelerators)
        self.units = units_of(self.shape, plan) if self._device is None else self._device.units
        config = transformers_config(checkpoint)
        self._switches_at = switches_at(config)
        if plan.prefill_chunk is not None and follows_length(config):
            raise StatedError("This model's rotary embedding follows a prompt's length, so it is not cut: plan without prefill_chunk.")
        models = [build_model(config) for _ in range(1 if self._device is None else len(self._device.stages))]
        self.base_bytes = process.resident_bytes()
        self._pool = Pool(plan.threads.get("compute", 1)) if self._device is None else self._device.stages[-1].pool
        self._processor: Processor = HostProcessor(self._pool) if self._device is None else self._device.stages[-1].processor
        self._reader = DiskReader(checkpoint.files, plan.threads.get("disk_io", 1))
        try:
            self._blocks = self._bound(models, checkpoint, self._kv_folder(cache))
            touch_working(self.shape, plan)
            if isinstance(self._processor, HostProcessor):
                check_rows(self.shape, plan)
            if isinstance(self._processor, HostProcessor) or plan.attention.host:
                compile_for(plan.kv.format.key, plan.kv.format.value)
        except BaseException:
            self.close()
            raise
        for path in self._reader.buffered_files:
            self.remarks.append(f"Direct reads of {path.name} are refused by its file system; it is read through the page cache.")
        garbage.set_aside()

    def generate(
        self,
        requests: Sequence[Request],
        on_done: Callable[[Completion], None] | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        short: Callable[[], bool] = lambda: False,
    ) -> list[Completion]:
        """Complete every prompt; completions in the order of the requests.

        Prompts are taken longest first, as the plan assumes, so that the first block needs the most memory; where the plan says so
        (`Plan.refill`), they take the places of rows that finish before their block does. A request that cannot be run (an empty prompt,
        a meaningless setting) becomes a completion with `error`.

        Args:
            on_done: called with each completion as soon as it is finished.
            on_progress: called after every step.
            short: asked after every step whether memory is short: blocks then become smaller.

        Raises:
            StatedError: the requests need more memory than the plan has, memory is short for a single row, or a device failed.
        """
        done: dict[int, Completion] = {}
        for progress, _ in self.steps(requests, done, on_done, short):
            if on_progress is not None:
                on_progress(progress)
        return [done[index] for index in range(len(requests))]

    def steps(
        self,
        requests: Sequence[Request],
        done: dict[int, Completion],
        on_done: Callable[[Completion], None] | None = None,
        short: Callable[[], bool] = lambda: False,
    ) -> Generator[tuple[Progress, list[Row]], None, None]:
        """What `generate` does, step by step: progress, and the rows of the block as they are then.

        All steps are taken in one thread. Closing the iterator ends the work.

        Args:
            done: takes completions by the places of their requests.
        """

        def finish(index: int, completion: Completion) -> None:
            done[index] = completion
            if on_done is not None:
                on_done(completion)

        rows: list[tuple[int, Row]] = []
        for index, request in enumerate(requests):
            try:
                self._check_positions(request)
                rows.append((index, make_row(request, self._generation, self.shape.vocab_size)))
            except StatedError as error:
                finish(index, Completion(request.id, (), len(request.token_ids), "error", str(error)))
        places = {id(row): index for index, row in rows}

        def restart(row: Row) -> None:
            new = make_row(row.request, self._generation, self.shape.vocab_size)
            row.sampler, row.tokens, row.generated, row.log_probabilities = new.sampler, new.tokens, new.generated, []

        most_rows = self.plan.micro_batch * self.plan.num_micro_batches
        waiting = Waiting([row for _, row in rows], most_rows, self.plan.refill, restart)
        first = len(waiting.first())
        if self._device is None:
            check_room(self.plan, self._block(waiting.first()))
        pace = Pace(self.plan, [row for _, row in rows])
        for number in count():
            if not (block := self._block(waiting.take())):
                break
            full = sum(len(batch.rows) for batch in block) == first
            with closing(self._blocks.run(block, full, self._stop_ids, self._decode, waiting, short)) as steps:
                for step, finished in steps:
                    for row in finished:
                        finish(places[id(row)], _completion(row))
                    yield pace.after(step, number, block, finished, self.meter), [row for batch in block for row in batch.rows]
            self.meter.keep_spans = False
        if waiting.places < most_rows:
            self.remarks.append(f"Memory got short: blocks were made smaller, from {most_rows} prompts to {waiting.places}.")

    def score(
        self, texts: Sequence[Sequence[int]], num_decoded: int = 0, on_progress: Callable[[float], None] = lambda share: None
    ) -> list[Score]:
        """What the model says of every token but the first of each text, given those before it; one score a text.

        Args:
            texts: token ids, more than `num_decoded` of each.
            num_decoded: the last tokens of each text that are given one by one, in decode steps, which read the keys and values kept;
                the others are computed in one prefill, whose keys and values are as computed.
            on_progress: called after every step with the share that is done.
        """
        rows = [scored_row(text, num_decoded, self.shape.vocab_size) for text in texts]
        blocks, num_steps = self._split(rows, every_logit=True), max(1, num_decoded)
        for number, block in enumerate(blocks):
            for step, _ in self._blocks.run(block):
                on_progress((number + (step + 1) / num_steps) / len(blocks))
        return [Score.joined(row.scores) for row in rows]

    def input_squares(
        self, texts: Sequence[Sequence[int]], on_progress: Callable[[float], None] = lambda share: None
    ) -> dict[str, torch.Tensor]:
        """Mean square of what each column of the layers' matrices is multiplied with, over the tokens of some texts: fp32 [K] by name.

        An expert's are those of the tokens that chose it; all experts of a layer count together.
        """
        found = MeanSquares()
        blocks = self._split([scored_row(text, 0, self.shape.vocab_size) for text in texts], keep_logits=True)
        for runtime in self._runtimes:
            runtime.observe = found.add
        try:
            for number, block in enumerate(blocks, 1):
                for _ in self._blocks.run(block):
                    pass
                on_progress(number / len(blocks))
        finally:
            for runtime in self._runtimes:
                runtime.observe = None
        return {name: square for name, square in found.means().items() if self.shape.by_name[name].layer is not None}

    def first_logits(self, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Logits after each prompt, [prompts, vocabulary] fp32: what the first generated token is chosen from."""
        rows = [make_row(Request(str(i), tuple(prompt), 1), {}, self.shape.vocab_size) for i, prompt in enumerate(prompts)]
        kept: list[torch.Tensor] = []
        for block in self._split(rows, keep_logits=True):
            for _ in self._blocks.run(block):
                pass
            kept += [batch.kept_logits[0] for batch in block]
        return torch.cat(kept)

    def report(self) -> RunReport:
        """What has been run since the engine was opened, beside what was predicted."""
        return run_report(
            self.plan, self.shape, self.units, merged(self._meters), self.stores, self._device,
            base_bytes=self.base_bytes, bytes_read=self.bytes_read, remarks=self.remarks, reader=self._reader,
        )  # fmt: skip

    def close(self) -> None:
        """End every thread and give torch back its own; the engine cannot be used afterwards."""
        if self._device is not None:
            self._device.close()
        self._reader.close()
        self._pool.close()
        torch.set_num_threads(self._torch_threads)
        garbage.take_back()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def bytes_read(self) -> int:
        """Bytes read from disk since the engine was opened, as the kernel counts them."""
        return process.bytes_read_from_disk() - self._bytes_read_before

    def _split(self, rows: Sequence[Row], *, every_logit: bool = False, keep_logits: bool = False) -> list[list[MicroBatch]]:
        """Blocks of micro-batches, in the order given."""
        size = self.plan.micro_batch * self.plan.num_micro_batches
        return [
            self._block(rows[at : at + size], every_logit=every_logit, keep_logits=keep_logits) for at in range(0, len(rows), size)
        ]

    def _block(self, rows: Sequence[Row], *, every_logit: bool = False, keep_logits: bool = False) -> list[MicroBatch]:
        """Micro-batches of the rows of one block. Caches are allocated when it begins."""
        size = self.plan.micro_batch
        kind = MicroBatch if self._device is None else DeviceBatch
        return [
            kind(number, rows[at : at + size], self.shape, self.plan, self._processor, every_logit, keep_logits)
            for number, at in enumerate(range(0, len(rows), size))
        ]

    def _bound(self, models: Sequence[Any], checkpoint: Checkpoint, kv_folder: Path) -> BlockRunner | DeviceRunner:
        """Load the weights, put our parts into the models, and make what runs blocks."""
        plan, shape, units, reader, device = self.plan, self.shape, self.units, self._reader, self._device
        self.stores: Sequence[StoredWeights]
        if device is None:
            weights = WeightStore(checkpoint, plan, units, reader)
            self.stores, self._meters = [weights], [self.meter]
            check_bytes(self.stores, shape, plan)
            self._runtimes = [bind_model(models[0], shape, units, weights, self._processor, self.meter, layers_cut=plan.stream == "matrix")]
            return BlockRunner(models[0], units, plan, self._runtimes[0], weights, reader, self.meter, kv_folder)
        stages = device.bind(models, shape, checkpoint, plan, reader, self.meter)
        self.stores, self._meters = [one.weights for one in stages], [one.meter for one in stages]
        self._runtimes = [one.runtime for one in stages]
        check_bytes(self.stores, shape, plan)
        return DeviceRunner(
            DeviceParts(shape, plan, device.decision, units, stages, reader, device.queues, device.host, self.meter, kv_folder)
        )

    @staticmethod
    def _kv_folder(cache: Path | None) -> Path:
        return (Settings.of_user().cache_directory if cache is None else cache) / "kv"

    def _check_positions(self, request: Request) -> None:
        length, total = len(request.token_ids), len(request.token_ids) + request.max_new_tokens
        if self._switches_at is not None and length <= self._switches_at < total:
            raise StatedError(
                f"This model changes its rotary embedding at {self._switches_at} tokens, and the prompt of {length} would grow to {total}: "
                f"ask for at most {self._switches_at - length} new tokens."
            )


def _completion(row: Row) -> Completion:
    assert row.finish_reason is not None
    told = tuple(row.log_probabilities[: len(row.generated)]) if row.request.log_probabilities else None  # an end token's is left out
    return Completion(row.request.id, tuple(row.generated), len(row.request.token_ids), row.finish_reason, None, told)
