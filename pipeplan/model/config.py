"""Hugging Face configs: read, checked and named in errors."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pipeplan.errors import FileFormatError, ModelError, nearest

# Without these, transformers would quietly take the sizes of the family's first published model.
_DEPTH_KEYS = ("num_hidden_layers", "layers_block_type", "layer_types", "hybrid_override_pattern")
_WIDTH_KEYS_BY_KIND = {  # the first that the family knows
    "embedding": ("vocab_size",),
    "attention": ("num_attention_heads",),
    "mlp": ("intermediate_size",),
    "moe": ("moe_intermediate_size", "intermediate_size"),
}


def read_config(path: Path) -> dict[str, Any]:
    """Return what a ``config.json`` holds.

    Raises:
        FileFormatError: It is missing, not JSON, or not a mapping.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_hook=_plain_float)
    except FileNotFoundError:
        raise FileFormatError(f"model config {path} does not exist") from None
    except json.JSONDecodeError as error:
        raise FileFormatError(
            f"model config {path}, line {error.lineno}: {error.msg.lower()}; is it truncated?"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise FileFormatError(f"model config {path} can't be read: {error}") from None
    if not isinstance(content, dict):
        raise FileFormatError(f"model config {path} holds no keys; expected a Hugging Face config")
    return content


def _plain_float(content: dict[str, Any]) -> Any:
    """Return the number that transformers wraps where JSON has none: ``{"__float__": "Infinity"}``."""
    return float(content["__float__"]) if content.keys() == {"__float__"} else content


def config_from_mapping(content: Mapping[str, Any], where: str) -> Any:
    """Return transformers' config object for a causal language model, on our terms: no cache, named outputs.

    Args:
        where: What to call the config in errors.

    Raises:
        ModelError: The model type is missing or unknown, a needed key is missing, or transformers refuses a value.
    """
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type = content.get("model_type")
    if not isinstance(model_type, str):
        raise ModelError(f"{where}: no 'model_type', so this is not a Hugging Face config")
    known = set(CONFIG_MAPPING.keys())
    if model_type not in known:
        raise ModelError(
            f"{where}: transformers knows no model type {model_type!r}{nearest(model_type, sorted(known))}"
        )
    config_class = CONFIG_MAPPING[model_type]
    try:
        config = config_class.from_dict(dict(content))
    except Exception as error:  # transformers and its validators raise many kinds
        raise ModelError(f"{where}: transformers refuses this {model_type} config: {one_line(error)}") from error
    try:
        text_config = config.get_text_config()
    except ValueError as error:
        raise ModelError(
            f"{where}: model type {model_type!r} holds several language models; give the config of one of them"
        ) from error
    if text_config is not config:
        nested = next(
            (
                value
                for value in content.values()
                if isinstance(value, Mapping) and value.get("model_type") == text_config.model_type
            ),
            None,
        )
        content = content.get("text_config", nested or {})
        config = text_config
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelError(
            f"{where}: model type {config.model_type!r} has no causal language model in transformers"
            f"{nearest(config.model_type, sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))}"
        )
    _check_sizes(content, config, where)
    config.use_cache = False
    config.return_dict = True
    config.output_hidden_states = False
    return config


def _check_sizes(content: Mapping[str, Any], config: Any, where: str) -> None:
    for choices in (("hidden_size",), _DEPTH_KEYS):
        _check_given(content, config, choices, where)


def check_widths(content: Mapping[str, Any], config: Any, kinds: Collection[str], where: str) -> None:
    """Check that a config gives the sizes that its layers need, where the family would have one of its own for them.

    The language model inside a larger model may leave them out, since that is how transformers saves such configs.

    Args:
        kinds: Of the model's layers; ``mamba+mlp`` counts as both.

    Raises:
        ModelError: A size is missing; names it.
    """
    if config.model_type != content["model_type"]:
        return
    parts = {part for whole in kinds for part in whole.split("+")}
    for kind in sorted(parts & _WIDTH_KEYS_BY_KIND.keys()):
        key = next((key for key in _WIDTH_KEYS_BY_KIND[kind] if isinstance(_default(config, key), int)), None)
        if key is not None:
            _check_given(content, config, (key,), where)


def _default(config: Any, key: str) -> Any:
    return getattr(type(config), type(config).attribute_map.get(key, key), None)


def _check_given(content: Mapping[str, Any], config: Any, choices: tuple[str, ...], where: str) -> None:
    if _given(content, config) & set(choices) or _has_older_name(content, config, choices[0]):
        return
    hint = nearest(choices[0], _strange(content, config))
    raise ModelError(f"{where}: key {choices[0]!r} is missing{hint}")


def _has_older_name(content: Mapping[str, Any], config: Any, key: str) -> bool:
    """Return whether other keys decide the value of ``key``, as ``block_ff_dim`` does LFM2's ``intermediate_size``."""
    other = 2 * (_default(config, key) or 1)
    try:
        return bool(getattr(type(config).from_dict({**content, key: other}), key) != other)
    except Exception:  # transformers and its validators raise many kinds; no answer is no other name
        return False


def _given(content: Mapping[str, Any], config: Any) -> set[str]:
    """Return the keys of ``content``, under all their names."""
    names = type(config).attribute_map
    return {
        *content,
        *(names[key] for key in content if key in names),
        *(name for name, alias in names.items() if alias in content),
    }


def _strange(content: Mapping[str, Any], config: Any) -> list[str]:
    """Return the keys that mean nothing to the family."""
    known = type(config).attribute_map
    return sorted(key for key in content if key not in known and not hasattr(type(config), key))


def one_line(error: Exception) -> str:
    """Return the message of a foreign error on one line, with its type where the message alone says little."""
    text = " ".join(line.strip() for line in str(error).splitlines() if line.strip())[:300]
    return f"{type(error).__name__}: {text}" if isinstance(error, LookupError | TypeError | AttributeError) else text
