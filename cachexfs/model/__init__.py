"""The durability model: how long until a checkpoint survives, what stands at risk, which route to take.

Needs numpy and scipy (extra ``model``); imports nothing else of CacheX FS but its errors. Names are loaded
when they are asked for, so that ``cachexfs.model.records`` stays cheap to import.
"""

from __future__ import annotations

from importlib import import_module

_WHERE = {
    "observe": ("Observations", "observations"),
    "readers": ("read_observations",),
    "location": ("Levels", "LocationModel", "fit_location", "others_bound", "pinned_straggler"),
    "completion": ("Spread", "Regime", "fit_spread", "fit_regimes", "fit_censored", "CensoredFit"),
    "intervals": ("Interval",),
    "tails": ("TailCount", "count_tail"),
    "tracker": ("StateTracker", "Forecast"),
    "delays": ("Delay",),
    "boundaries": ("Parts", "Boundaries", "compose"),
    "risk": (
        "Exposure",
        "Waste",
        "BestInterval",
        "exposure",
        "waste",
        "optimal_interval",
        "uncovered_share",
        "pair_loss",
    ),
    "route": ("Decision", "Evidence", "decide_route"),
    "fitted": ("FittedModel", "Prediction", "fit"),
    "store": ("load_model", "save_model"),
    "simulation": ("Scenario", "Simulated", "simulate"),
    "records": ("BoundaryRecord",),
    "online": ("Online", "Choice"),
}
_MODULE_OF = {name: module for module, names in _WHERE.items() for name in names}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> object:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return __all__
