"""HuggingFace's config.json as plain values, whichever version of transformers wrote it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG_FILE = "config.json"
DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """Rotary position embedding: base, rotated part of each head, and the parameters of its scaling (kind: type)."""

    theta: int
    percent: float
    kind: str
    scaling: Mapping[str, Any]


class HFConfig:
    """The fields of one config.json; `raw` is the file as it is, `get` falls back on transformers' defaults."""

    def __init__(self, raw: Mapping[str, Any], filled: Mapping[str, Any], where: str) -> None:
        """filled: the same file with every default of its class; where: the folder, for messages."""
        self.raw, self.where = raw, where
        self._filled = filled

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field; None counts as missing."""
        value = self.raw.get(name)
        if value is None:
            value = self._filled.get(name)
        return default if value is None else value

    @property
    def architecture(self) -> str:
        """The class of the model, such as LlamaForCausalLM."""
        return architecture_name(self.raw, self.where)

    def rope(self, default_percent: float = 1.0) -> Rope:
        """Return the rotary embedding, from the spelling of transformers 5 or 4."""
        values = self._rope_values()
        nested = [name for name, value in values.items() if isinstance(value, Mapping)]
        if nested:
            raise ValueError(
                f"{self.where} rotates its layers differently ({', '.join(nested)}), which is not built here"
            )
        theta = float(values.get("rope_theta", 10000.0))
        if not theta.is_integer():
            raise ValueError(f"{self.where} has the rope base {theta}, but --rotary-base is a whole number: change it")
        kind = values.get("rope_type") or values.get("type") or "default"
        percent = values.get("partial_rotary_factor")
        return Rope(
            theta=int(theta), percent=default_percent if percent is None else float(percent), kind=kind, scaling=values
        )

    def _rope_values(self) -> dict[str, Any]:
        raw = self.raw
        if isinstance(raw.get("rope_parameters"), Mapping):
            return {**raw["rope_parameters"]}
        values: dict[str, Any] = dict(self._filled.get("rope_parameters") or {})
        old = {
            "rope_theta": raw.get("rotary_emb_base", raw.get("rope_theta")),
            "partial_rotary_factor": raw.get("rotary_pct", raw.get("partial_rotary_factor")),
            **(raw.get("rope_scaling") or {}),
        }
        values.update({name: value for name, value in old.items() if value is not None})
        if not values:
            values = {name: self.get(name) for name in ("rope_theta", "partial_rotary_factor")}
            values.update(self.get("rope_scaling", {}))
        return {name: value for name, value in values.items() if value is not None}

    def window(self) -> int | None:
        """Return how many tokens each token sees, itself included; None for all. Raises for layers that differ."""
        width = self.get("sliding_window")
        if width is None or self.get("use_sliding_window", True) is False:
            return None
        kinds = self.get("layer_types")
        if kinds is None and "max_window_layers" in self.raw and self.get("use_sliding_window") is not None:
            first = int(self.raw["max_window_layers"])
            kinds = ["sliding_attention" if i >= first else "full" for i in range(self.get("num_hidden_layers"))]
        if kinds is not None and set(kinds) != {"sliding_attention"}:
            if "sliding_attention" not in kinds:
                return None
            raise ValueError(
                f"{self.where} has a window on some layers only, which is not built here: every layer or none"
            )
        return int(width)

    def require_default(self, name: str, allowed: Any) -> None:
        """Raise ValueError unless a field has the one value that is built here."""
        value = self.get(name, allowed)
        if value != allowed:
            raise ValueError(f"{self.where} has {name} {value!r}, built here is only {allowed!r}")


def architecture_name(raw: Mapping[str, Any], where: str) -> str:
    """Return the class that a config.json names. Raises ValueError where it names none."""
    names = raw.get("architectures") or []
    if len(names) != 1:
        raise ValueError(f"{where}/{CONFIG_FILE} names {len(names)} architectures: it must name the model's class")
    return str(names[0])


def read_raw_config(folder: Path) -> dict[str, Any]:
    """Return config.json. Raises ValueError where it is missing or no JSON object."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ValueError(f"{folder} has no {CONFIG_FILE}: give the folder of a HuggingFace model")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path} holds no JSON object: it is not a model's config")
    return raw


def read_config(folder: Path) -> HFConfig:
    """Return the config of a folder, defaults filled in by the installed transformers."""
    import transformers

    raw = read_raw_config(folder)
    try:
        kind = transformers.AutoConfig.for_model(str(raw.get("model_type")))
        filled = type(kind).from_dict(dict(raw)).to_dict()
    except Exception as error:  # noqa: BLE001 - transformers raises whatever its checks raise
        reason = " ".join(str(error).split())
        raise ValueError(f"transformers cannot read {folder}/{CONFIG_FILE}: {reason}") from None
    return HFConfig(raw, filled, str(folder))
