"""Policies by name: an embedded one, a directory, or a Hub id (`Qwen/Qwen2.5-1.5B-Instruct`).

`check_policy` reads JSON only, so that reading a sweep file is quick. `load_policy` loads the
weights and makes the checks that need a loaded policy. The directory of a trained policy has the
config and tokenizer files of its base, and a digest of the policy from which its training started;
that of an adapter has no weights below it, so that only `load_policy` takes its name.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import struct
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdpo_tune.core import policy_shapes
from gdpo_tune.core.errors import PolicyError
from gdpo_tune.core.files import (
    HUB_ID,
    expand_path,
    is_directory,
    is_file,
    path_exists,
    write_atomically,
)
from gdpo_tune.core.registry import POLICIES
from gdpo_tune.core.trial_files import ADAPTER_CONFIG
from gdpo_tune.policies.adapters import join_adapter, read_base
from gdpo_tune.policies.prompt_format import TEMPLATE_FILE, find_turn_end

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase


WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
"""Patterns of the files that hold weights."""
_NOISE = ("jitter_noise", "input_jitter_noise")
"""Attributes of mixture-of-experts routers: multiplicative jitter of their input in training."""
_OWN_TOKENS = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes of tokenizers that have no special tokens but those of their files."""
PROBE = "Write f(x): k is 17, plus 9\n<think>17+9=26</think><answer>def f(x): return 26*x</answer>"
"""Text that a tokenizer must split in the same way however it was loaded."""
ANSWER_SECONDS = 5.0
"""Seconds that the Hub has to answer a dry run."""
_BASE_FILES = (
    *("config.json", "tokenizer*.*", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.*", "merges.txt"),
)
_STRUCTURE = ("model_type", "quantization_config")
"""Settings that must agree with the weights."""


def resolve_policy(name: str) -> str:
    """Return what `from_pretrained` takes for a policy's name; a Hub id stays as it is."""
    if name in POLICIES:
        return str(POLICIES[name])
    return str(expand_path(name)) if name.startswith("~") or "$" in name else name


def check_policy(name: str, revision: str = "") -> None:
    """Refuse a policy that could not be trained, in milliseconds and without the network.

    A Hub id passes: `check_policy_available` asks the Hub for it. Only a policy on the Hub has a
    `revision`.

    Raises:
        PolicyError: the name or its directory cannot be used; the message says what to do.
    """
    directory = Path(resolve_policy(name))
    try:
        is_present = directory.exists()
    except OSError as error:
        raise PolicyError(
            f"policy {name!r}: {directory} cannot be reached: {error.strerror}: allow this user to "
            "search the directories above it, or give another directory"
        ) from error
    if is_present and revision:
        raise PolicyError(
            f"policy {name!r} is a directory, so model.revision = {revision} would have no effect: "
            "remove it, or give a Hub id"
        )
    if is_present:
        _check_directory(name, directory)
    elif not HUB_ID.fullmatch(name):
        raise PolicyError(
            f"policy {name!r}: no such directory and not a Hub id. {suggest_policy(name)}It must "
            f"be one of {', '.join(POLICIES)}, a directory with config.json, or a Hub id of the "
            "form org/name"
        )


def suggest_policy(name: str) -> str:
    """Return `Did you mean 'embedded'? ` for a policy of a similar name, else an empty text.

    It is one that ships, that a recipe names or that was downloaded, or a directory beside.
    """
    from huggingface_hub.constants import HF_HUB_CACHE

    folders = (path.name.split("--") for path in Path(HF_HUB_CACHE).glob("models--*"))
    names = [*POLICIES, *policy_shapes.KNOWN_POLICIES, *("/".join(parts[1:]) for parts in folders)]
    above = Path(resolve_policy(name)).parent
    if is_directory(above) and os.access(above, os.R_OK):
        names += [str(path) for path in above.iterdir() if (path / "config.json").exists()]
    close = get_close_matches(os.path.normpath(name), names, n=1)
    return f"Did you mean {close[0]!r}? " if close and name not in names else ""


def load_policy(
    name: str,
    dtype: torch.dtype | str | None = None,
    revision: str = "",
    *,
    dropout: bool = False,
    temperature: float = 1.0,
    weights: Path | None = None,
    attention: str = "auto",
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a policy's weights (on the CPU, in float32 without `dtype`) and its tokenizer.

    `dtype` may be a name, or "auto" for the type of its files. `weights` is another directory with
    those of a training from this policy. An adapter stands for what it makes of its base.

    The tokenizer pads on the left, with its end token if it has no pad token, as TRL does. Of the
    policy's generation config only the ids of tokens stay; `temperature` is that by which it is
    judged, see `build_neutral_decoding`. Its dropout is off, unless `dropout` keeps it.

    Raises:
        PolicyError: it cannot be read, has no end token, or its tokenizer is not the saved one.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    location = resolve_policy(name)
    base, revision = _find_base(name, revision)
    is_adapter = base != name
    version = {"revision": revision} if revision else {}
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            location, padding_side="left", **({} if is_adapter else version)
        )
        # Typed as a model alone; with the flag it is a pair.
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            weights or resolve_policy(base),
            dtype=dtype or torch.float32,
            output_loading_info=True,
            **({} if weights else version),
            **({} if attention == "auto" else {"attn_implementation": attention}),
        )
    except Exception as error:  # of every kind, where a file has a wrong value
        lines = [line.strip().rstrip(".:") for line in str(error).strip().splitlines()[:2]]
        if not isinstance(error, ImportError | OSError | ValueError | RuntimeError):
            lines.insert(0, type(error).__name__)
        raise PolicyError(
            f"policy {name!r} cannot be loaded: {': '.join(lines)}. Check the name, or download it"
        ) from error
    model: PreTrainedModel = join_adapter(loaded[0], Path(location)) if is_adapter else loaded[0]
    if missing := sorted(loaded[1]["missing_keys"]):
        # Transformers would use random numbers in their place.
        raise PolicyError(
            f"policy {name!r}: its files lack {len(missing)} weights of the model that config.json "
            f"describes, such as {missing[0]}: save the whole model"
        )
    _check_loaded(name, "" if is_adapter else revision, model, tokenizer)
    model.generation_config = build_neutral_decoding(model, tokenizer, temperature)
    if not dropout:
        turn_off_dropout(model)
    return model, tokenizer


def _find_base(name: str, revision: str) -> tuple[str, str]:
    """Return name and revision of the policy below an adapter, else those given; refuse a bad one.

    The base is never the adapter itself, which `check_policy` refuses.
    """
    directory = Path(resolve_policy(name))
    if not is_file(directory / ADAPTER_CONFIG):
        check_policy(name, revision)
        return name, revision
    base = read_base(directory)
    try:
        check_policy(*base)
    except PolicyError as error:
        raise PolicyError(f"the base of {name}: {error}") from error
    return base


def build_neutral_decoding(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, temperature: float
) -> GenerationConfig:
    """Build a generation config that samples from the policy itself, and ends where a trial does.

    `generate` takes whatever a call leaves out from the config of the model, such as `min_p`,
    `suppress_tokens` or `num_beams`. A trained policy is saved with this config, so that its
    directory samples as it was judged.

    Source: `GenerationMixin._prepare_generation_config` of transformers; trl#5783, verl#7270.
    """
    from transformers import GenerationConfig

    own: Any = model.generation_config
    ends = list_end_tokens(tokenizer, own.eos_token_id)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    return GenerationConfig(
        bos_token_id=own.bos_token_id,
        eos_token_id=ends[0] if len(ends) == 1 else list(ends),
        pad_token_id=tokenizer.pad_token_id,
        **(sampling if temperature else {"do_sample": False}),
    )


def list_end_tokens(tokenizer: Any, declared: int | Sequence[int] | None) -> tuple[int, ...]:
    """List the tokens that end a completion: by tokenizer, generation config and template."""
    more = [declared] if isinstance(declared, int | None) else declared
    tokens = (tokenizer.eos_token_id, *more, find_turn_end(tokenizer))
    return tuple(dict.fromkeys(token for token in tokens if token is not None))


def read_own_decoding(name: str, revision: str = "") -> dict[str, Any] | None:
    """Read the generation config of a policy's files; None if they are not on this machine."""
    directory = find_local_directory(name, revision)
    if directory is None:
        return None
    own = _read_json(name, directory / "generation_config.json")
    config = _read_json(name, directory / "config.json")
    if own is None and config and any(file for each in WEIGHTS for file in directory.glob(each)):
        return {"eos_token_id": config.get("eos_token_id")}  # as Transformers does
    return own


def turn_off_dropout(model: PreTrainedModel) -> None:
    """Let a policy compute in training what it computes in evaluation: no dropout and no noise.

    Probabilities are set to 0 wherever forward passes read them: in modules of dropout, in numbers
    that other modules hold, and in the model's configs.

    Source: trl#3234, trl#3500. `disable_dropout` of TRL knows `nn.Dropout` alone.
    """
    for module in model.modules():
        is_dropout = "drop" in type(module).__name__.lower()
        for owner in (module, getattr(module, "config", None)):
            for key, value in list(getattr(owner, "__dict__", {}).items()):
                is_random = "drop" in key or key in _NOISE or (is_dropout and key == "p")
                if is_random and isinstance(value, float):
                    setattr(owner, key, 0.0)


def read_position_limit(name: str, revision: str = "") -> int | None:
    """Return how many tokens a policy reads and writes; None if no file on this machine says so."""
    directory = find_local_directory(name, revision)
    config = None if directory is None else _read_json(name, directory / "config.json")
    return policy_shapes.find_position_limit(config or {})


def measure_policy(name: str, revision: str = "") -> policy_shapes.PolicyShapes | None:
    """Return the size of a policy, from its config.json and the headers of its safetensors files.

    None if they are neither here nor in the cache of the Hub and no recipe names the policy. That
    of an adapter is the size of its base.
    """
    directory = find_local_directory(name, revision)
    if directory is not None and is_file(directory / ADAPTER_CONFIG):
        return measure_policy(*read_base(directory))
    files = [] if directory is None else sorted(directory.glob("*.safetensors"))
    if not files:
        return policy_shapes.find_known_size(name)
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        for file in files:
            with file.open("rb") as stream:
                (length,) = struct.unpack("<Q", stream.read(8))
                if length > 100 * 2**20:  # the format's own limit
                    return None  # not a file of safetensors; `load_policy` reports broken files
                header: dict[str, Any] = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            ends = [each["data_offsets"][1] for each in header.values()]
            if file.stat().st_size != 8 + length + max(ends, default=0):
                return None  # torn
            shapes |= {n: tuple(map(int, each["shape"])) for n, each in header.items()}
        config = _read_json(name, files[0].parent / "config.json")
        return policy_shapes.PolicyShapes(shapes, config) if config else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, struct.error, PolicyError):
        return None


def takes_argument(model: Any, name: str) -> bool:
    """Return whether the forward pass of a policy, below its adapters, has an argument."""
    network = model.get_base_model() if hasattr(model, "peft_config") else model
    return name in inspect.signature(type(network).forward).parameters


def _check_directory(name: str, directory: Path) -> None:
    if not directory.is_dir():
        raise PolicyError(f"policy {name!r} is a file: give the directory that holds config.json")
    config = _read_json(name, directory / "config.json")
    if (directory / ADAPTER_CONFIG).is_file():
        raise PolicyError(
            f"policy {name!r} is an adapter, and a training begins at a whole policy: write one by "
            "python -m gdpo_tune.publish SWEEP:CANDIDATE --to USER/NAME --dry-run"
        )
    if config is None:
        raise PolicyError(
            f"policy {name!r}: {directory} has no config.json: give a directory that "
            "save_pretrained wrote"
        )
    _refuse_quantized(name, config)
    if not any(path for pattern in WEIGHTS for path in directory.glob(pattern)):
        raise PolicyError(
            f"policy {name!r}: {directory} has no weights: save the model there as safetensors"
        )
    if any(directory.glob("*.safetensors")) and measure_policy(name) is None:
        raise PolicyError(
            f"policy {name!r}: a safetensors file in {directory} is torn, or it is a pointer of "
            "git-lfs: download it again, or run git lfs pull there"
        )
    tokenizer = _read_json(name, directory / "tokenizer_config.json")
    if tokenizer is None:
        raise PolicyError(
            f"policy {name!r}: {directory} has no tokenizer_config.json: save the tokenizer there "
            "too"
        )
    older = _read_json(name, directory / "special_tokens_map.json") or {}
    kind = tokenizer.get("tokenizer_class")
    # Older files leave the class, and its own end token, to the model's type: those of GPT-2 do.
    if kind in _OWN_TOKENS or (kind is None and config.get("eos_token_id") is None):
        _require_end_token(name, tokenizer.get("eos_token") or older.get("eos_token"))


def _splits_as_saved(tokenizer: PreTrainedTokenizerBase, directory: Path) -> bool:
    """Return whether a tokenizer splits text as the file that is saved in a directory does."""
    from tokenizers import Tokenizer

    file = directory / "tokenizer.json"
    if not file.is_file():
        return True
    expected = Tokenizer.from_file(str(file)).encode(PROBE, add_special_tokens=False).ids
    return bool(tokenizer(PROBE, add_special_tokens=False)["input_ids"] == expected)


@functools.lru_cache
def _keeps_its_tokens(directory: Path) -> bool:
    """Return whether files are read by their path as they are by the name of a policy on the Hub.

    Transformers corrects the class of some tokenizers by that name. Source: transformers#45488.
    """
    from transformers import AutoTokenizer

    return _splits_as_saved(AutoTokenizer.from_pretrained(directory), directory)


def _check_loaded(
    name: str, revision: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    _require_end_token(name, tokenizer.eos_token)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    # `AutoTokenizer` may pick a class by the model's type and replace the pre-tokenizer without a
    # warning. Then numbers may be split into digits, and the policy can no longer calculate.
    if not _splits_as_saved(tokenizer, find_local_directory(name, revision) or Path()):
        raise PolicyError(
            f"policy {name!r}: AutoTokenizer splits text differently from the saved "
            "tokenizer.json: its model type has a tokenizer class of its own; save the model "
            "under a type whose class keeps the file (llama or qwen3)"
        )
    embeddings: Any = model.get_input_embeddings()
    rows: int = embeddings.weight.shape[0]
    if len(tokenizer) > rows:
        raise PolicyError(
            f"policy {name!r}: its tokenizer has {len(tokenizer)} tokens but the model only "
            f"{rows} embeddings: call model.resize_token_embeddings(len(tokenizer)) and save again"
        )


def _require_end_token(name: str, token: object) -> None:
    if not token:
        raise PolicyError(
            f"policy {name!r} has no end token: set tokenizer.eos_token, save the tokenizer to a "
            "directory and give that directory"
        )


def _read_json(name: str, file: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise PolicyError(f"policy {name!r}: {file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise PolicyError(f"policy {name!r}: {file} does not hold a JSON object")
    return content


def find_local_directory(name: str, revision: str = "") -> Path | None:
    """Return the directory of a policy: its own, or that in the cache of the Hub."""
    directory = Path(resolve_policy(name))
    if is_directory(directory):
        return directory
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(name, "config.json", revision=revision or None)
    except HFValidationError:
        return None
    return Path(config).parent if isinstance(config, str) else None


def _refuse_quantized(name: str, config: Mapping[str, Any]) -> None:
    """Refuse weights that no training changes; those of MXFP4 become whole as they are loaded."""
    own: Any = config.get("quantization_config")
    method = own.get("quant_method", "quantized") if isinstance(own, Mapping) else "mxfp4"
    if method != "mxfp4":
        raise PolicyError(
            f"policy {name!r}: its weights are quantized ({method}), and a training changes whole "
            "ones: give the policy from which they were made"
        )


def check_policy_available(name: str, revision: str = "") -> None:
    """Refuse what `check_policy` does, and a Hub id that is neither cached nor on the Hub.

    It fetches a configuration of a few KB.

    Raises:
        PolicyError: the policy cannot be used or fetched; the message says what to do.
    """
    check_policy(name, revision)
    if path_exists(Path(resolve_policy(name))):
        return
    from huggingface_hub import hf_hub_download

    try:
        file = hf_hub_download(name, "config.json", revision=revision or None)
    except (OSError, ValueError) as error:  # all errors of the Hub client
        raise _build_hub_error(name, revision, error) from error
    _refuse_quantized(name, _read_json(name, Path(file)) or {})


def describe_policy(name: str, revision: str = "") -> str:
    """Describe the files of a policy, for a dry run; the Hub is asked about one that is not here.

    Raises:
        PolicyError: the policy cannot be used, or the Hub has none of this name.
    """
    check_policy(name, revision)
    if name in POLICIES:
        return f"{name} ships with the package"
    if path_exists(Path(resolve_policy(name))):
        return f"{name} is a directory with a configuration, weights and a tokenizer"
    directory = find_local_directory(name, revision)
    if directory is not None and any(file for each in WEIGHTS for file in directory.glob(each)):
        return f"{name} is in the local cache of the Hub"
    from httpx import HTTPError
    from huggingface_hub import HfApi
    from huggingface_hub import errors as hub

    refusals = (hub.RepositoryNotFoundError, hub.RevisionNotFoundError, hub.HFValidationError)
    try:
        HfApi().model_info(name, revision=revision or None, timeout=ANSWER_SECONDS)
    except refusals as error:
        raise _build_hub_error(name, revision, error) from error
    except (OSError, HTTPError):
        text = "is not in the local cache, and the Hub does not answer, so it was not checked"
        return f"{name} {text}. {suggest_policy(name)}".rstrip()
    return f"{name} is on the Hub; this machine has no copy of its weights yet"


def _build_hub_error(name: str, revision: str, error: Exception) -> PolicyError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    place = f"{name!r} at revision {revision}" if revision else repr(name)
    return PolicyError(
        f"policy {place} cannot be loaded from the Hub: {reason}. {suggest_policy(name)}"
        "Check the name, or download it on a machine with a network and give its directory"
    )


def restore_base_files(directory: Path, policy: str, revision: str = "") -> None:
    """Replace a trained policy's config and tokenizer files by those of its base.

    Version 5 of Transformers would write keys and a class that version 4 ignores or refuses:
    `rope_parameters`, `TokenizersBackend`. The type of the weights and the chat template stay those
    of the directory. All its settings stay where `_STRUCTURE` differs: the weights that are loaded
    of a multimodal or quantized base are not those that its files describe. So do the files of a
    tokenizer that would be read otherwise here. A base that is not at hand changes nothing.

    Source: MIGRATION_GUIDE_V5.md of Transformers; vllm#42624.
    """
    settings, template = directory / "config.json", directory / TEMPLATE_FILE
    base = find_local_directory(policy, revision)
    is_path = base == Path(resolve_policy(policy))  # by which the training has read it
    patterns = _BASE_FILES if is_path or (base and _keeps_its_tokens(base)) else _BASE_FILES[:1]
    for file in (file for pattern in patterns for file in (base.glob(pattern) if base else ())):
        content = json.loads(file.read_bytes()) if file.name.endswith("config.json") else {}
        if file.name == settings.name:
            if not settings.is_file():  # an adapter alone
                continue
            written = json.loads(settings.read_bytes())
            if any(key in content and content[key] != written.get(key) for key in _STRUCTURE):
                continue
            key = "dtype" if "dtype" in content else "torch_dtype"  # version 5 reads both
            content[key] = written.get("dtype") or written.get("torch_dtype")
        elif "chat_template" in content and template.is_file():  # versions read one or the other
            content["chat_template"] = template.read_text(encoding="utf-8")
        text = json.dumps(content, indent=2, ensure_ascii=False) if content else file.read_bytes()
        # Replaced, not changed: a policy that is linked shares its files with a checkpoint.
        write_atomically(directory / file.name, text)


def find_required_version(*directories: Path | None) -> int | None:
    """Return the first major version of Transformers that reads a policy; None: any does.

    Files of an adapter are in its directory, and in that of its base, unless it is unknown.
    """
    files = (file for each in directories if each for file in each.glob("*config.json"))
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    return 5 if "rope_parameters" in text or "TokenizersBackend" in text else None
