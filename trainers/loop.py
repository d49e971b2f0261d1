"""The training loop, the same in every mode: announce, step, record, validate, save."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from paramserver.consistency import Decision, Verdict
from paramserver.errors import TaskError
from paramserver.limits import epoch_of, is_due
from paramserver.metrics.records import CoreWait, StepReport, TrainerTotals, peak_rss_mb
from paramserver.parameters.numerics import name_float64
from paramserver.trainers.base import Step, Trainer, save_every
from paramserver.transport.messages import OptimizerCall


class TrainingLoop:
    """Calls a trainer from its first connection to the end of the run: what is done when, and in which order.

    Args:
        trainer: makes the steps.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._served_before = 0  # samples, before this process trained
        self._core_wait = CoreWait()
        self._epoch_end = 0.0  # the epoch that is open ends at this number of samples applied

    def run(self) -> Decision:
        """Train from the first connection to the end, and return the decision that ended the run.

        Everything that was opened is closed, also if an error is raised.
        """
        trainer = self.trainer
        try:
            trainer.init_connection()
            if not trainer.process.kept.has_started:
                trainer.process.kept.has_started = True
                for hooks in trainer.hooks:
                    hooks.on_train_start()
            trainer.data.start()
            decision = self._fit()
            trainer.data.stop_feeding()  # before the last validation and checkpoint, which may take long
            self._finish(decision)
        except BaseException as error:
            cause = trainer.control.report_failure(error)
            if cause is error:
                raise
            raise cause from error
        finally:
            trainer.close()
        return decision

    def _fit(self) -> Decision:
        """Take the steps on which the trainers decide, until they decide to end; return that decision."""
        trainer = self.trainer
        trainer.on_fit_start()
        self._served_before, self._core_wait = trainer.progress.samples_served, CoreWait()
        trainer.clock.skip()
        while True:
            with trainer.step_scope():
                trainer.current_step.is_open = True
                decision = trainer.agree()
                trainer.current_step = Step(decision)
                if decision.verdict is Verdict.END:
                    self._close_epoch()
                    break
                takes_step = decision.verdict is Verdict.GO and self._take_step(decision)
            if takes_step:
                self._after_step()
            elif decision.verdict in (Verdict.BARRIER, Verdict.VALIDATE):
                self._between_steps(decision)
        trainer.current_step.is_common = True
        trainer.step = decision.step
        trainer.clock.skip()
        return decision

    def _finish(self, decision: Decision) -> None:
        """Validate and save for the last time; only save after a signal, and before other trainers continue."""
        trainer = self.trainer
        completes = not (decision.interrupted or decision.resizes)
        if completes and self._validate():
            trainer.control.saved_step = None  # a checkpoint of this step was saved before it turned out to be the best
        trainer.save("end" if completes else "resize" if decision.resizes else "interrupted")
        if not decision.resizes:
            for hooks in trainer.hooks:
                hooks.on_train_end()
        if not self._is_record_due():
            trainer.record("buffer", **trainer.data.record(), end=True)
        trainer.leave(self._totals(), decision)

    # A step.

    def _take_step(self, decision: Decision) -> bool:
        """Train on this trainer's batches of a step, or follow the others; return whether there is a new version."""
        trainer = self.trainer
        trainer.current_step.is_open = True
        if decision.samples >= self._epoch_end:
            with trainer.hooks_between_steps():
                self._enter_epoch(decision.samples)
        trainer.current_step.is_common = True
        by_calls = bool(trainer.parameters_of)
        if by_calls:
            trainer.optimizer_calls.batch_began = trainer.step = decision.step
        has_data = trainer.current_step.in_batches = trainer.trainer_index in decision.active
        if has_data:
            trainer.step = self._train_by_calls() if by_calls else self._train(decision)
        else:
            trainer.step = self._follow_calls() if by_calls else trainer.idle(decision)
        trainer.current_step.in_batches = trainer.current_step.is_open = False
        if has_data:
            self._record_first_step()
        return has_data or trainer.step != decision.step

    def _train(self, decision: Decision) -> int:
        """Train on the batches of a step; return the version that results."""
        trainer = self.trainer
        batches, samples, summed = [], 0, 0.0
        for _ in range(decision.batches):
            batch, batch_samples = self._next_batch()
            batches.append((batch, batch_samples))
            samples += batch_samples
        self._load(samples)
        for number, (batch, trainer.current_step.batch_samples) in enumerate(batches, start=1):
            last = number == len(batches)
            with (
                name_float64("training_step", batch, trainer.model),
                nullcontext() if last else trainer.block_backward_sync(),
            ):
                value, loss = trainer.forward_batch(batch)
                summed += value
                if last:
                    trainer.on_last_loss(summed / number, samples)
                trainer.backward_batch(loss, len(batches))
        trainer.check_layers()
        loss_of_step = summed / len(batches)
        report = StepReport(trainer.trainer_index, decision.step, samples, loss_of_step, trainer.seconds)
        trainer.current_step.batch_samples = 1
        result = trainer.step_optimizer(report)
        if result is None:  # it is known later
            return decision.step + 1
        trainer.control.update_applied(result)
        return result.step

    def _train_by_calls(self) -> int:
        """Train on a batch whose ``training_step`` calls ``optimize``; return the version that results."""
        trainer, calls, batch_idx = self.trainer, self.trainer.optimizer_calls, self.trainer.progress.batch_idx
        batch, samples = self._next_batch()
        trainer.current_step.batch_samples = samples
        self._load(samples)
        for hooks in trainer.hooks:
            hooks.on_batch_start(batch_idx)
        calls.made = 0
        with name_float64("training_step", batch, trainer.model), trainer.autocast:
            returned = trainer.task.training_step(trainer.model, batch, batch_idx)
        if returned is not None or not calls.made:
            what = "returned a value" if returned is not None else "did not call it"
            raise TaskError(
                f"training_step must call self.trainer.optimize(name, loss) and return None with several optimizers "
                f"({', '.join(trainer.parameters_of)}); in batch {batch_idx} it {what}"
            )
        calls.exchange(OptimizerCall())
        calls.made, trainer.current_step.batch_samples = -1, 1
        trainer.clock.lap("forward")
        trainer.end_batch()
        return trainer.step

    def _follow_calls(self) -> int:
        """Follow the calls of the trainers that have data; return the version after their batch."""
        trainer, calls = self.trainer, self.trainer.optimizer_calls
        calls.made = 0
        while calls.exchange(None):
            trainer.follow_update()
            trainer.step += 1
            calls.made += 1
            trainer.clock.lap("wait")
            trainer.end_step()
        calls.made = -1
        return trainer.step

    def _next_batch(self) -> tuple[Any, int]:
        batch, samples = self.trainer.data.next_batch()
        batch = self.trainer.on_before_forward(batch)
        self.trainer.clock.lap("data")
        return batch, samples

    def _load(self, samples: int) -> None:
        """Load the version of a step, once its batches are there, which have so many samples."""
        self.trainer.data.read_ahead()
        self.trainer.clock.lap("data")
        self.trainer.load_version()
        self.trainer.progress.samples_served += samples

    def _record_first_step(self) -> None:
        timer = self.trainer.process.startup_timer
        if "first step" not in timer.phases:
            timer.mark("first step")
            self.trainer.record("phase", phases=dict(timer.phases))

    def _enter_epoch(self, samples: int) -> None:
        """Enter the epoch of the next sample, after ``samples`` were applied."""
        progress, epoch_samples = self.trainer.progress, self.trainer.data.epoch_samples
        for epoch in range(progress.epoch, epoch_of(samples, epoch_samples)):
            self._close_epoch()
            # After the last sample of an epoch and before the first of the next, also if a run was resumed in between.
            self.trainer.on_epoch_ended(epoch)
            progress.epoch = epoch + 1
        if not progress.epoch_open:
            progress.epoch_open = True
            if self.trainer.monitor is not None:
                self.trainer.monitor.enter_epoch(progress.epoch)
            for hooks in self.trainer.hooks:
                hooks.on_epoch_start(progress.epoch)
        self._epoch_end = (progress.epoch + 1) * epoch_samples if epoch_samples else float("inf")

    def _close_epoch(self) -> None:
        progress = self.trainer.progress
        if progress.epoch_open:
            progress.epoch_open = False
            for hooks in self.trainer.hooks:
                hooks.on_epoch_end(progress.epoch)

    # Between two steps.

    def _after_step(self) -> None:
        """Record, validate and save what is due after a step."""
        trainer = self.trainer
        if not trainer.parameters_of:  # otherwise each call of ``optimize`` was one
            trainer.end_step()
        if self._is_record_due():
            trainer.record("buffer", **trainer.data.record())
        if trainer.lockstep and trainer.is_due(trainer.step):
            self._validate_and_save()

    def _between_steps(self, decision: Decision) -> None:
        """With trainers that run freely: validate a retained version, or do at a barrier all that is due."""
        trainer = self.trainer
        trainer.clock.skip()
        trainer.step = decision.step
        if decision.verdict is not Verdict.VALIDATE:
            self._validate_and_save()
        elif decision.share == trainer.trainer_index:
            self._validate()
        else:
            trainer.validate(decision.share)

    def _validate_and_save(self) -> None:
        """Do what is due at the current step, which all trainers have reached."""
        trainer, config, since = self.trainer, self.trainer.config, self.trainer.optimizer_calls.batch_began
        improved = is_due(trainer.step, config.training.validate_every, since) and self._validate()
        if improved or is_due(trainer.step, save_every(config), since):
            trainer.save("best" if improved else "periodic")

    def _validate(self) -> bool:
        """Validate this trainer's share of the current version, once; return whether the result is the best so far."""
        trainer = self.trainer
        if trainer.validator.validated_step == trainer.step:
            return False
        trainer.validator.validated_step = trainer.step
        return trainer.validate(trainer.trainer_index)

    def _is_record_due(self) -> bool:
        """Whether the last step has a periodic record: of the run's steps, or of its own if trainers run freely."""
        trainer = self.trainer
        step = trainer.step if trainer.lockstep else trainer.progress.steps
        return is_due(step, trainer.config.logging.log_every, trainer.optimizer_calls.batch_began)

    def _totals(self) -> TrainerTotals:
        trainer, clock = self.trainer, self.trainer.clock
        return TrainerTotals(
            trainer_index=trainer.trainer_index,
            samples=trainer.progress.samples_served,
            samples_before=self._served_before,
            batches=trainer.progress.batch_idx,
            samples_left=trainer.data.samples_left,
            seconds=clock.steps.total_s,
            phases_s={**clock.seconds, "hidden": clock.hidden_s},
            steps=clock.steps,
            buffer=trainer.data.figures(),
            peak_rss_mb=peak_rss_mb(),
            wire_bytes=trainer.wire_bytes,
            core_wait_share=self._core_wait.share(),
            threads=torch.get_num_threads(),
        )
