"""Policies by name: an embedded one, a local folder, or a Hub id (`Qwen/Qwen2.5-1.5B-Instruct`).

`check_policy` reads JSON only and is meant for the moment when a sweep file is read; `load_policy`
loads the weights and checks what only a loaded policy can tell.
"""

from __future__ import annotations

import json
import re
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdpo_tune.core.errors import PolicyError
from gdpo_tune.core.registry import POLICIES, load

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_PROBE = "Write f(x): k is 17, plus 9\n<think>17+9=26</think><answer>def f(x): return 26*x</answer>"
"""Text that a tokenizer must split alike however it was loaded."""


def embedded_folder() -> str:
    """Folder of the policy that ships for the code task."""
    return str(Path(__file__).parent / "embedded")


def embedded_math_folder() -> str:
    """Folder of the policy that ships for the mathematics tasks."""
    return str(Path(__file__).parent / "embedded_math")


def embedded_tools_folder() -> str:
    """Folder of the policy that ships for the tools task."""
    return str(Path(__file__).parent / "embedded_tools")


def policy_folder(name: str) -> str:
    """What `from_pretrained` takes for a policy's name; a folder or Hub id stays as it is."""
    if name in POLICIES:
        return load(POLICIES[name])()
    return str(Path(name).expanduser()) if name.startswith("~") else name


def check_policy(name: str, revision: str = "") -> None:
    """Refuse a policy that could not be trained, in milliseconds and without the network.

    A Hub id that is no local folder passes: `check_available` asks for it.

    Args:
        name: as in a sweep file.
        revision: branch, tag or commit, which only a policy on the Hub has.

    Raises:
        PolicyError: what is wrong with the name or its folder, and what to do.
    """
    folder = Path(policy_folder(name))
    try:
        present = folder.exists()
    except OSError as error:
        raise PolicyError(
            f"policy {name!r}: {folder} cannot be reached: {error.strerror}: allow this user to "
            "search the folders above it, or give another folder"
        ) from error
    if present and revision:
        raise PolicyError(
            f"policy {name!r} is a folder, so model.revision = {revision} would have no effect: "
            "remove it, or give a Hub id"
        )
    if present:
        _check_folder(name, folder)
    elif not _HUB_ID.fullmatch(name):
        close = get_close_matches(name, POLICIES, n=1)
        hint = f"did you mean {close[0]!r}? It" if close else "it"
        raise PolicyError(
            f"policy {name!r}: no such folder and not a Hub id: {hint} must be one of "
            f"{', '.join(POLICIES)}, a folder with config.json, or a Hub id of the form org/name"
        )


def check_available(name: str, revision: str = "") -> None:
    """`check_policy`, and a Hub id must be in the local cache or on the Hub.

    Fetches a configuration of a few KB, so that a misspelt id costs no cluster its start.

    Raises:
        PolicyError: what is wrong with the name, its folder or the Hub, and what to do.
    """
    check_policy(name, revision)
    if Path(policy_folder(name)).exists():
        return
    from huggingface_hub import hf_hub_download

    try:
        hf_hub_download(name, "config.json", revision=revision or None)
    except OSError as error:  # what the Hub's client raises for each of its reasons
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise PolicyError(
            f"policy {name!r} cannot be had from the Hub: {reason}. Check the name, or download it "
            "where there is a network and give its folder"
        ) from error


def load_policy(
    name: str, dtype: torch.dtype | None = None, revision: str = ""
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a policy's weights (to the CPU, in float32 unless `dtype` says otherwise) and tokenizer.

    The tokenizer pads on the left, as generation needs.

    Raises:
        PolicyError: it cannot be found or read, has no pad or end token, or its tokenizer does not
            come back from its file as it was saved.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    check_policy(name, revision)
    folder = policy_folder(name)
    version = {"revision": revision} if revision else {}
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, padding_side="left", **version
        )
        # Typed as a model alone; with the flag it is a pair.
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype or torch.float32, output_loading_info=True, **version
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise PolicyError(
            f"policy {name!r} cannot be loaded: {reason}. Check the name, or download it first "
            "and give its folder"
        ) from error
    model: PreTrainedModel = loaded[0]
    loading: dict[str, Any] = loaded[1]
    if loading["missing_keys"]:
        # Transformers would go on with random numbers in their place.
        missing = sorted(loading["missing_keys"])
        raise PolicyError(
            f"policy {name!r}: its files lack {len(missing)} weights of the model that config.json "
            f"describes, such as {missing[0]}: save the whole model (an adapter must be merged)"
        )
    _check_loaded(name, model, tokenizer)
    return model, tokenizer


def _check_folder(name: str, folder: Path) -> None:
    if not folder.is_dir():
        raise PolicyError(f"policy {name!r} is a file: give the folder that holds config.json")
    config = _read_json(name, folder / "config.json")
    if config is None:
        raise PolicyError(
            f"policy {name!r}: {folder} has no config.json: give a folder that save_pretrained "
            "wrote (an adapter must be merged into its model first)"
        )
    if not any(path for pattern in _WEIGHTS for path in folder.glob(pattern)):
        raise PolicyError(
            f"policy {name!r}: {folder} has no weights: save the model there as safetensors"
        )
    tokenizer = _read_json(name, folder / "tokenizer_config.json")
    if tokenizer is None:
        raise PolicyError(
            f"policy {name!r}: {folder} has no tokenizer_config.json: save the tokenizer there too"
        )
    specials = {**(_read_json(name, folder / "special_tokens_map.json") or {}), **tokenizer}
    for key, word in (("pad_token", "pad"), ("eos_token", "end")):
        if not specials.get(key):
            raise _missing_token(name, key, word)


def _check_loaded(name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    for key, word in (("pad_token", "pad"), ("eos_token", "end")):
        if getattr(tokenizer, key) is None:
            raise _missing_token(name, key, word)
    _check_tokenizer_file(name, tokenizer)
    embeddings: Any = model.get_input_embeddings()
    rows: int = embeddings.weight.shape[0]
    if len(tokenizer) > rows:
        raise PolicyError(
            f"policy {name!r}: its tokenizer has {len(tokenizer)} tokens but the model only "
            f"{rows} embeddings: call model.resize_token_embeddings(len(tokenizer)) and save again"
        )


def _check_tokenizer_file(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Compare a loaded tokenizer with its own file.

    `AutoTokenizer` may pick a class by the model's type and replace the pre-tokenizer in silence;
    then numbers fall into digits, and a policy that could calculate no longer can.
    """
    from tokenizers import Tokenizer

    file = Path(policy_folder(name)) / "tokenizer.json"
    if not file.is_file():
        return
    saved = Tokenizer.from_file(str(file))
    expected = saved.encode(_PROBE, add_special_tokens=False).ids
    if tokenizer(_PROBE, add_special_tokens=False)["input_ids"] != expected:
        raise PolicyError(
            f"policy {name!r}: AutoTokenizer splits text differently from the saved tokenizer.json:"
            " its model type has a tokenizer class of its own; save the model under a type whose "
            "class keeps the file (llama or qwen3)"
        )


def _missing_token(name: str, key: str, word: str) -> PolicyError:
    return PolicyError(
        f"policy {name!r} has no {word} token: set tokenizer.{key}, save the tokenizer to a folder "
        "and give that folder"
    )


def _read_json(name: str, file: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if there is no such file."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise PolicyError(f"policy {name!r}: {file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise PolicyError(f"policy {name!r}: {file} does not hold a JSON object")
    return content
