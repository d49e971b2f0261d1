"""The limits of a buffer, refused at the start where no wait could ever end."""

from __future__ import annotations


def check_limits(capacity: int, watermark: int, max_bytes: int | None, batch_size: int | None) -> None:
    check_at_least("capacity", capacity, 1, "set it to the number of samples that a trainer may hold")
    check_at_least("watermark", watermark, 0, "use 0 for none")
    if max_bytes is not None:
        check_at_least("max_bytes", max_bytes, 1, "leave it out for no limit")
    if watermark > capacity:
        raise ValueError(
            f"watermark ({watermark}) must be at most capacity ({capacity}), else it is never reached; "
            "lower watermark or raise capacity"
        )
    if batch_size is not None:
        check_at_least("batch_size", batch_size, 1, "leave it out where it is not known")
        if batch_size > capacity:
            raise ValueError(
                f"batch_size ({batch_size}) must be at most capacity ({capacity}), else no batch is ever gathered; "
                "lower batch_size or raise capacity"
            )


def check_min_new(min_new_per_batch: int, batch_size: int | None, capacity: int) -> None:
    check_at_least("min_new_per_batch", min_new_per_batch, 0, "use 0 for none")
    name, limit = ("capacity", capacity) if batch_size is None else ("batch_size", batch_size)
    if min_new_per_batch > limit:
        raise ValueError(
            f"min_new_per_batch ({min_new_per_batch}) must be at most {name} ({limit}), else no batch is ever "
            "gathered; lower min_new_per_batch"
        )


def check_at_least(name: str, value: int, least: int, cure: str) -> None:
    if value < least:
        raise ValueError(f"{name} ({value}) must be at least {least}; {cure}")
