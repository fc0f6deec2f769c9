"""Reading the keys of one config.json: types, defaults, other spellings, and errors that name the key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from moesaic.spec.errors import SpecError, nearest
from moesaic.spec.families.defaults import DEFAULTS, IGNORED, REQUIRED, SIZES, SPELLINGS
from moesaic.spec.model import Activation

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}

MOST_LAYERS = 4096
"""Every layer is described on its own, so a slip of the finger must not ask for millions."""

MOST = 2**40
"""No size of a model is larger, and products of a few of them still fit into a float."""

NOT_NEGATIVE = {"rms_norm_eps", "initializer_range", "router_aux_loss_coef", "router_jitter_noise", "moe_norm_min"}
ABOVE_ZERO = {"logits_scaling", "routed_scaling_factor", "clip_qkv", "floor_scale"}
"""Numbers that are divided by, or that cut everything off when they are zero."""


class Config:
    """The keys of one model of one family.

    A key that is absent takes the default of the family's config class; an explicit null stays null where the family
    knows null, and takes the default where a value is needed. Sizes that were filled in are collected for a note.
    """

    def __init__(self, raw: Mapping[str, Any], family: str, name: str, checked: Iterable[str] = ()) -> None:
        self.original = dict(raw)
        self.raw = dict(raw)
        self.family = family
        self.name = name
        self.defaults = DEFAULTS[family]
        self.filled: dict[str, Any] = {}
        spellings = SPELLINGS.get(family, {})
        for other, key in spellings.items():
            if other in self.raw and self.raw.get(key) is None:
                self.raw[key] = self.raw[other]
        self._refuse_unknown(checked, set(spellings))
        missing = [key for key in REQUIRED if self.raw.get(key) is None]
        if missing:
            raise SpecError(
                f"{name}: a {family} config needs {_listed(REQUIRED)}; missing: {', '.join(missing)}. Add "
                f"{'it' if len(missing) == 1 else 'them'}."
            )
        if self.integer("num_hidden_layers") > MOST_LAYERS:
            raise SpecError(
                f"{name}: num_hidden_layers is {self.raw['num_hidden_layers']}; at most {MOST_LAYERS} work."
            )

    def _refuse_unknown(self, checked: Iterable[str], spellings: set[str]) -> None:
        known = (set(self.defaults) - {"default_theta"}) | set(REQUIRED) | IGNORED | spellings
        for key in checked:
            if key not in known:
                raise SpecError(f"{self.name}: {self.family} knows no key {key!r}; {nearest(key, known - IGNORED)}")

    def value(self, key: str) -> Any:
        """The value of `key`, or the family's default if it is absent."""
        if key in self.raw:
            return self.raw[key]
        return self._default(key)

    def _default(self, key: str) -> Any:
        default = self.defaults.get(key)
        if key in SIZES and default is not None:
            self.filled[key] = default
        return default

    def _needed(self, key: str, kind: str) -> Any:
        found = self.raw.get(key)
        if found is None:
            found = self._default(key)
        if found is None:
            raise SpecError(f"{self.name}: a {self.family} config needs {key} ({kind}), and it is missing. Add it.")
        return found

    def _wrong(self, key: str, found: Any, wanted: str) -> SpecError:
        return SpecError(f"{self.name}: {key} must be {wanted}, but is {found!r}.")

    def integer(self, key: str, least: int = 1) -> int:
        """An integer of at least `least`."""
        return self._integer(key, self._needed(key, "an integer"), least)

    def _integer(self, key: str, found: Any, least: int) -> int:
        whole = isinstance(found, int) or (isinstance(found, float) and found.is_integer())
        if isinstance(found, bool) or not whole or found < least:
            raise self._wrong(key, found, f"an integer of at least {least}")
        if found > MOST:
            raise SpecError(f"{self.name}: {key} is {float(min(found, 1e300)):.4g}; at most {MOST:,} works.")
        return int(found)

    def optional_integer(self, key: str, least: int = 1) -> int | None:
        """An integer of at least `least`, or None."""
        found = self.value(key)
        return None if found is None else self._integer(key, found, least)

    def number(self, key: str) -> float:
        """A finite number."""
        found = self._needed(key, "a number")
        if isinstance(found, bool) or not isinstance(found, (int, float)) or not -1e38 < found < 1e38:
            raise self._wrong(key, found, "a number")
        if (key in NOT_NEGATIVE and found < 0) or (key in ABOVE_ZERO and found <= 0):
            raise self._wrong(key, found, "a number above 0" if key in ABOVE_ZERO else "a number of at least 0")
        return float(found)

    def optional_number(self, key: str) -> float | None:
        """A finite number, or None."""
        return None if self.value(key) is None else self.number(key)

    def flag(self, key: str) -> bool:
        """True or false; null is false."""
        found = self.value(key)
        if found is not None and not isinstance(found, (bool, int)):
            raise self._wrong(key, found, "true or false")
        return bool(found)

    def choice(self, key: str, known: Iterable[str]) -> str:
        """One of the words `known`."""
        found = self._needed(key, "a word")
        names = list(known)
        if found not in names:
            raise SpecError(f"{self.name}: {key} is {found!r}; {nearest(str(found), names)}")
        return cast(str, found)

    def integers(self, key: str) -> list[int] | None:
        """A list of integers (layer numbers), or None."""
        found = self.value(key)
        if found is None:
            return None
        if not isinstance(found, (list, tuple)):
            raise self._wrong(key, found, "a list of integers")
        return [self._integer(key, item, 0) for item in found]

    def per_layer(self, key: str, layers: int, least: int = 0) -> list[int]:
        """One integer for every layer, or a list with one per layer."""
        found = self._needed(key, "an integer, or a list with one per layer")
        if not isinstance(found, (list, tuple)):
            return [self._integer(key, found, least)] * layers
        if len(found) != layers:
            raise SpecError(
                f"{self.name}: {key} lists {len(found)} values for {layers} layers; give one per layer, or one integer "
                f"for all."
            )
        return [self._integer(key, item, least) for item in found]

    def words_per_layer(self, key: str, layers: int, known: tuple[str, ...]) -> list[str] | None:
        """A list with one of the words `known` for each layer, or None."""
        found = self.value(key)
        if found is None:
            return None
        if not isinstance(found, (list, tuple)) or len(found) != layers:
            length = len(found) if isinstance(found, (list, tuple)) else "no list"
            raise SpecError(f"{self.name}: {key} must list one word for each of {layers} layers, but has {length}.")
        for word in found:
            if word not in known:
                raise SpecError(f"{self.name}: {key} has {word!r}; {nearest(str(word), known)}")
        return list(found)

    def activation(self) -> Activation:
        """`hidden_act` in this project's words."""
        return ACTIVATIONS[self.choice("hidden_act", ACTIVATIONS)]

    def document_end(self) -> int | None:
        """The token that ends a document: `eos_token_id`, the first of them if there are several."""
        found = self.raw.get("eos_token_id")
        if isinstance(found, (list, tuple)):
            found = found[0] if found else None
        return found if isinstance(found, int) and found >= 0 else None


def _listed(words: Iterable[str]) -> str:
    names = list(words)
    return ", ".join(names[:-1]) + " and " + names[-1]
