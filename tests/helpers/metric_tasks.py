"""Tasks whose validation has metrics that are no means, and tasks that gather values of all trainers."""

import os
import signal
from pathlib import Path

import torch
from tasks import ReferenceTask, UnevenLengths


class Recall:
    """Mean over the classes of the share of their samples that are found: no mean over samples."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.found, self.all = torch.zeros(5), torch.zeros(5)

    def update(self, output, labels):
        self.all += torch.bincount(labels, minlength=5)
        self.found += torch.bincount(labels[output.argmax(1) == labels], minlength=5)

    def merge_state(self, other):
        self.found += other.found
        self.all += other.all

    def compute(self):
        return (self.found / self.all.clamp(min=1)).mean()


class Measured(ReferenceTask):
    """Returns one metric that lives as long as the task, one for each batch, and a mean."""

    def validation_step(self, model, batch, valid_batch_idx, batch_idx):
        images, labels = batch
        output, each = model(images), Recall()
        if valid_batch_idx == 0:
            assert not getattr(self, "recall", Recall()).all.any()  # it was reset after the last validation
        self.recall = vars(self).get("recall") or Recall()
        self.recall.update(output, labels)
        each.update(output, labels)
        values = super().validation_step(model, batch, valid_batch_idx, batch_idx)
        return {**values, "recall": self.recall, "each": each}


class OfTorchmetrics(ReferenceTask):
    def on_train_start(self):
        from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score

        self.metrics = {
            "accuracy_tm": MulticlassAccuracy(5, average="micro"),
            "auroc": MulticlassAUROC(5),
            "f1": MulticlassF1Score(5),
        }

    def validation_step(self, model, batch, valid_batch_idx, batch_idx):
        images, labels = batch
        output = model(images).softmax(1)
        for metric in self.metrics.values():
            metric.update(output, labels)
        return {**super().validation_step(model, batch, valid_batch_idx, batch_idx), **self.metrics}


class Vector(Recall):
    def compute(self):
        return self.found


class NotMergeable(Recall):
    merge_state = None


class Wrong(ReferenceTask):
    def __init__(self, what, **options):
        super().__init__(**options)
        self.what = what

    def validation_step(self, model, batch, valid_batch_idx, batch_idx):
        if self.what == "mixed":
            return {"x": Recall() if valid_batch_idx else 1.0}
        return {"x": {"vector": Vector, "state": NotMergeable}[self.what]()}


class Gathers(ReferenceTask):
    """Gathers in every place where that is possible, and checks what it gets."""

    def gather(self, *place):
        trainer = self.trainer
        index = trainer.trainer_index
        value = {"place": place, "index": index, "tensor": torch.full((index + 1,), float(index), requires_grad=True)}
        found = trainer.all_gather(value)
        assert [one["index"] for one in found] == list(range(len(found))), found
        assert {one["place"] for one in found} == {place}, found
        assert all(torch.equal(one["tensor"], torch.full((i + 1,), float(i))) for i, one in enumerate(found))
        assert not any(one["tensor"].requires_grad for one in found)
        self.log("gathered", len(found), reduce="max")

    def on_batch_start(self, batch_idx):
        self.gather("batch_start", batch_idx)

    def training_step(self, model, batch, batch_idx):
        for number in range(3):
            self.gather("step", batch_idx, number)
        return super().training_step(model, batch, batch_idx)

    def on_batch_end(self, batch_idx):
        self.gather("batch_end", batch_idx)

    def on_validation_start(self, batch_idx):
        self.gather("validation_start", batch_idx)

    def validation_step(self, model, batch, valid_batch_idx, batch_idx):
        if valid_batch_idx == 0:
            self.gather("validation_step", batch_idx)
        return super().validation_step(model, batch, valid_batch_idx, batch_idx)

    def on_validation_end(self, batch_idx):
        self.gather("validation_end", batch_idx)

    def on_train_end(self):
        self.gather("train_end")


class GathersElsewhere(ReferenceTask):
    def __init__(self, hook, **options):
        super().__init__(**options)
        setattr(self, hook, lambda *_: self.trainer.all_gather(1))


class GathersAlone(ReferenceTask):
    """Trainer 1 does not gather."""

    def on_validation_end(self, batch_idx):
        if self.trainer.trainer_index == 0:
            self.trainer.all_gather(1)


class GathersFunction(ReferenceTask):
    def on_validation_end(self, batch_idx):
        self.trainer.all_gather({"unit": lambda value: value})


class GathersUneven(UnevenLengths):
    """Some trainers have no data in the last steps."""

    def training_step(self, model, batch, batch_idx):
        self.log("gathered", len(self.trainer.all_gather(self.trainer.trainer_index)), reduce="none")
        return super().training_step(model, batch, batch_idx)

    def on_validation_end(self, batch_idx):
        assert self.trainer.all_gather(self.trainer.trainer_index) == [0, 1]


class GathersAndDies(Gathers):
    """Trainer 1 is killed once, while trainer 0 waits for its value."""

    def __init__(self, mark, **options):
        super().__init__(**options)
        self.mark = Path(mark)

    def gather(self, *place):
        super().gather(place[0])  # the numbers of batches differ, as trainer 0 made steps without the other one

    def training_step(self, model, batch, batch_idx):
        if self.trainer.trainer_index == 1 and batch_idx == 2 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(model, batch, batch_idx)
