"""A fitted model on disk: JSON, readable by people.

Role: ``fit`` saves, ``predict``, ``advise`` and ``report`` load. Written to a temporary and renamed.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os

import numpy as np

from cachexfs.errors import UsageError
from cachexfs.model.completion import Regime, Spread
from cachexfs.model.fitted import FittedModel, Recent
from cachexfs.model.location import Levels, LocationModel
from cachexfs.model.tails import TailCount

FORMAT = "cachexfs-model-1"


def _plain(value: object) -> object:
    if isinstance(value, np.ndarray):
        return [float(v) for v in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return value


def dump_model(model: FittedModel) -> dict[str, object]:
    """The model as JSON values."""
    plain = _plain(model)
    assert isinstance(plain, dict)
    return {"format": FORMAT, **plain}


def save_model(model: FittedModel, path: str | os.PathLike[str]) -> None:
    """Write the model to ``path``, whole or not at all. Raises OSError."""
    name = os.fspath(path)
    temporary = f"{name}.tmp{os.getpid()}"
    try:
        with open(temporary, "w", encoding="ascii") as stream:
            json.dump(dump_model(model), stream, allow_nan=False)
            stream.write("\n")
        os.replace(temporary, name)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise


def load_model(path: str | os.PathLike[str]) -> FittedModel:
    """The model saved at ``path``. UsageError if it is not there, damaged or of another format."""
    name = os.fspath(path)
    try:
        with open(name, encoding="utf-8") as stream:
            whole = json.load(stream)
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror}; make a model with 'cachexfs fit'") from error
    except ValueError as error:
        raise UsageError(f"{name} is not a model file; make one with 'cachexfs fit'") from error
    if not isinstance(whole, dict) or whole.get("format") != FORMAT:
        raise UsageError(f"{name} is not a model of this version; make one with 'cachexfs fit'")
    try:
        return _build(whole)
    except (KeyError, TypeError, ValueError, UsageError) as error:
        raise UsageError(f"{name} is damaged ({error}); make it again with 'cachexfs fit'") from error


def _build(whole: dict[str, object]) -> FittedModel:
    typical, spread, spec = whole["typical"], _dict(whole["spread"]), whole["bandwidth_spec"]
    model = FittedModel(
        system=str(whole["system"]),
        access=str(whole["access"]),
        slowest=_location(_dict(whole["slowest"])),
        typical=None if typical is None else _location(_dict(typical)),
        spread=Spread(
            _number(spread["sigma"]),
            _number(spread["theta"]),
            tuple(Regime(**{k: _number(v) for k, v in _dict(r).items()}) for r in _list(spread["regimes"])),
        ),
        repeat_sd=_number(whole["repeat_sd"]),
        repeats_total=int(_number(whole["repeats_total"])),
        tail=tuple(_tail(_dict(t)) for t in _list(whole["tail"])),
        failed=_number(whole["failed"]),
        bandwidth_spec=None if spec is None else _number(spec),
        fit_reasons=tuple(str(r) for r in _list(whole["fit_reasons"])),
        notes=tuple(str(r) for r in _list(whole["notes"])),
        recent=_recent(whole.get("recent")),
        levels=Levels(**{k: np.array([_number(x) for x in _list(v)]) for k, v in _dict(whole["levels"]).items()}),
    )
    if model.levels.writers.size == 0 or model.slowest.weight.size == 0:
        raise UsageError("it holds no levels")
    return model


def _location(fields: dict[str, object]) -> LocationModel:
    out: dict[str, object] = {}
    size = None
    for item in dataclasses.fields(LocationModel):
        value = fields[item.name]
        if item.name == "line":
            out["line"] = None if value is None else tuple(_number(v) for v in _list(value))
        elif isinstance(value, list):
            out[item.name] = np.array([_number(v) for v in value])
            size = len(value) if size is None else size
            if len(value) != size:
                raise UsageError("its arrays differ in length")
        else:
            out[item.name] = int(_number(value)) if item.name == "levels" else _number(value)
    return LocationModel(**out)  # type: ignore[arg-type]


def _recent(value: object) -> Recent | None:
    if value is None:
        return None
    fields = _dict(value)
    ratio, low, high = (_number(fields[k]) for k in ("ratio", "low", "high"))
    return Recent(ratio, low, high, fields["changed"] is True, int(_number(fields["observed"])))


def _tail(fields: dict[str, object]) -> TailCount:
    return TailCount(
        _number(fields["multiple"]),
        int(_number(fields["exceeded"])),
        int(_number(fields["total"])),
        _number(fields["probability"]),
        _number(fields["low"]),
        _number(fields["high"]),
    )


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UsageError(f"{value!r} is not a number")
    return float(value)


def _dict(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise UsageError("an object is missing")
    return value


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise UsageError("a list is missing")
    return value
