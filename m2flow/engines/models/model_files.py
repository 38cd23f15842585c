"""Find a model's files on the local disk, and read what needs no torch: its config and its tokenizer, with errors that say what is wrong.

    Model(path) --model_directory--> directory --config_of------> config of transformers
                                               --load_tokenizer-> TextCodec

Never a network look-up, never code from the model's directory. Torch is loaded where a .gguf file is converted alone, and by `transformers`
itself if it can be: `m2flow.runner.first_rows` keeps it from that.

A `.gguf` file is a quantised, degraded copy of the model it was made from. It is dequantised to float32, exactly, and kept under
`~/.cache/m2flow/gguf/<digest of path, size and modification time>` (or `$XDG_CACHE_HOME`). Several processes that need it at once wait for
the first.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import functools
import hashlib
import importlib
import importlib.util
import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

import transformers
from jinja2 import TemplateError

from m2flow.errors import DatasetError, MissingExtra, ModelError, described, lone_surrogate
from m2flow.recipe import ChatTemplate, Model, hub_directory, is_of_hub
from m2flow.samples import Prompt, check_prompt


def modules_of_models() -> dict[frozenset[str], dict[str, set[str]]]:
    """Return what `transformers.models` lists when it is loaded: packages needed -> module -> names in it. Empty: it is not known.

    It is a part of what `transformers` has listed, and kept, when it was loaded itself.
    """
    listing, prefix = getattr(transformers.utils.import_utils, "define_import_structure", None), "models."
    if listing is None:
        return {}
    found = listing(Path(transformers.__file__).parent / "models", prefix="models")
    return {
        packages: {module.removeprefix(prefix): names for module, names in modules.items() if module.startswith(prefix)}
        for packages, modules in found.items()
    }


def _load_models_package() -> None:
    """Load `transformers.models` without reading all models' source files, a quarter of a second, a second time for the same list."""
    if "transformers.models" in sys.modules or not (known := modules_of_models()):
        return
    utils = transformers.utils.import_utils
    before, utils.define_import_structure = utils.define_import_structure, lambda path: known
    try:
        importlib.import_module("transformers.models")
    finally:
        utils.define_import_structure = before


_load_models_package()


def converted_directory(file: Path) -> Path:
    """Return the Hugging Face directory of a .gguf file, converting it if that was not done yet.

    Raises:
        MissingExtra: the `gguf` package is not installed.
        ModelError: the file can't be read, or is of an architecture that transformers can't dequantise.
    """
    for package in ("gguf", "sentencepiece", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtra(f"reading {file} needs the package `{package}`", now="pip install 'm2flow[smollm]'")
    target = _cache_root() / _digest(file)
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            _convert(file, target)
    return target


def _cache_root() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "m2flow" / "gguf"


def _digest(file: Path) -> str:
    status = file.stat()
    return hashlib.sha256(f"{file.resolve()}\0{status.st_size}\0{status.st_mtime_ns}".encode()).hexdigest()[:32]


def _convert(file: Path, target: Path) -> None:
    import torch

    folder, name = str(file.parent), file.name
    partial = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # its progress bars can't be switched off
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name, local_files_only=True)
            quantised = transformers.AutoModelForCausalLM.from_pretrained(
                folder, gguf_file=name, dtype=torch.float32, local_files_only=True
            )
        # A model that remembers its quantisation refuses to be saved, so its weights move to one that does not.
        config = copy.deepcopy(quantised.config)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with torch.random.fork_rng(devices=[]):
            plain = type(quantised)(config)
        plain.load_state_dict(quantised.state_dict())
        with contextlib.redirect_stderr(io.StringIO()):
            plain.save_pretrained(str(partial))
            tokenizer.save_pretrained(str(partial))
        partial.rename(target)
    except Exception as error:
        raise ModelError(f"{file} can't be dequantised: {described(error)}", now="Is it a whole .gguf file?") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tekken.json")


def _check_whole(text: str) -> None:
    at = lone_surrogate(text)
    if at >= 0:
        raise DatasetError(
            f"the text {text!r:.80} has half of a surrogate pair, {text[at]!r}, at character {at}, which no tokenizer takes",
            now="Mend the dataset's row that has it: text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace').",
        )


def _name_of(tool: Mapping[str, Any]) -> str:
    """The name of a tool, which stands under `function`, or at the top where a description has no such wrapping."""
    return str(tool.get("function", tool).get("name"))


def _with_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose parts are joined to one text, as vLLM and SGLang do for templates that know texts alone."""
    content = message.get("content")
    return message if isinstance(content, str | None) else {**message, "content": "\n".join(part["text"] for part in content)}


@final
class TextCodec:
    """Encode text to token ids and decode them, by the model's own tokenizer."""

    def __init__(self, tokenizer: Any, eos_ids: frozenset[int], *, chat: bool, template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self._chat = chat
        self._template = template
        self.eos_ids = eos_ids
        """Ids that end a sequence: the tokenizer's, and those of generation_config.json."""
        self.special_ids = frozenset(int(token) for token in tokenizer.all_special_ids)
        """Ids that `decode` leaves out."""

    @property
    def fast(self) -> Any:
        """The tokenizer of transformers, for what works on its vocabulary."""
        return self._tokenizer

    @property
    def eos_id(self) -> int:
        """The id that a demonstration ends with. Raises `ModelError` if the tokenizer has none."""
        if self._tokenizer.eos_token_id is not None:
            return int(self._tokenizer.eos_token_id)
        if not self.eos_ids:
            raise ModelError("the tokenizer has no end-of-sequence token", now="Set `eos_token` in its tokenizer_config.json.")
        return min(self.eos_ids)

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Encode a prompt: a text with the tokenizer's own special tokens, and messages by the chat template.

        With `Model.chat` a text is a user's message. What the template writes is all that the model sees: no further
        beginning-of-sequence token is added, and a raw text that begins with one gets no second.

        Raises:
            DatasetError: it has half of a surrogate pair, or messages that the template refuses, or there is no template.
        """
        rendered = self.prompt_text(prompt)
        if rendered is not None:
            return list(self._tokenizer(rendered, add_special_tokens=False).input_ids)
        assert isinstance(prompt, str)
        _check_whole(prompt)
        ids = list(self._tokenizer(prompt).input_ids)
        if len(ids) > 1 and ids[0] == ids[1] == self._tokenizer.bos_token_id:
            ids = ids[1:]
        # A tokenizer that closes its texts with the end token would leave the model nothing to continue.
        return ids[:-1] if ids and ids[-1] in self.eos_ids else ids

    def prompt_text(self, prompt: Prompt) -> str | None:
        """A prompt as the chat template writes it, special tokens included; None of a raw text. Raises as `encode_prompt` does.

        Messages that end with one of the assistant are continued within it.
        """
        if isinstance(prompt, str) and not self._chat:
            return None
        messages = self._messages(prompt)
        is_begun = messages[-1]["role"] == "assistant"
        return self._rendered(messages, add_generation_prompt=not is_begun, continue_final_message=is_begun)

    def shortened(self, prompt: Prompt, limit: int, *, in_middle: bool) -> Prompt | None:
        """A prompt without so many of its first tokens, or those in its middle, that it has no more than `limit`; None if that can't be.

        Of messages it is the longest that is shortened, so that what the template writes around them stays whole.
        """
        if isinstance(prompt, str):
            text = prompt
        else:
            prompt = [_with_text(message) for message in prompt]
            longest = max(range(len(prompt)), key=lambda at: len(str(prompt[at].get("content") or "")))
            text = str(prompt[longest].get("content") or "")
        ids = self.encode_target(text)
        num_kept = len(ids) - max(len(self.encode_prompt(prompt)) - limit, 1)
        while num_kept >= 0:
            head = (num_kept + 1) // 2 if in_middle else 0
            tail = ids[len(ids) - (num_kept - head) :]
            # Half a character at the cut is left out.
            cut = self.decode(ids[:head]).rstrip("\ufffd") + self.decode(tail).lstrip("\ufffd")
            shorter: Prompt = cut
            if not isinstance(prompt, str):
                shorter = [{**message, "content": cut} if at == longest else message for at, message in enumerate(prompt)]
            count = len(self.encode_prompt(shorter))
            if 0 < count <= limit:
                return shorter
            num_kept -= max(count - limit, 1)
        return None

    def _messages(self, prompt: Prompt) -> list[dict[str, Any]]:
        """The messages of a prompt, after the policy's system message unless they have their own."""
        given: Prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else check_prompt(prompt, "the prompt")
        messages: list[dict[str, Any]] = [dict(message) for message in given if isinstance(message, Mapping)]
        if self._template.system and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self._template.system})
        return messages

    def _rendered(self, messages: Sequence[Mapping[str, Any]], **options: object) -> str:
        if not self._tokenizer.chat_template:
            raise DatasetError(
                "a prompt is a list of messages, and the tokenizer has no chat template",
                now="Pass Policy(..., chat_template=...), or write the prompt as a text.",
            )
        messages = messages if self._takes_parts else [_with_text(message) for message in messages]
        try:
            rendered = self._rendered_as_given(messages, **options)
        except (TemplateError, ValueError, TypeError) as error:
            raise DatasetError(
                f"the chat template refuses the messages: {brief(error)}", now="Write the prompt as the model's template wants it."
            ) from error
        _check_whole(rendered)
        return rendered

    def _rendered_as_given(self, messages: Sequence[Mapping[str, Any]], **options: object) -> str:
        template = self._template
        options = {"tools": json.loads(template.tools) or None, **json.loads(template.arguments), **options}
        return str(self._tokenizer.apply_chat_template(list(messages), tokenize=False, **options))

    @property
    def template(self) -> str:
        """The chat template's source; empty without one. (Of several by name, the default one, and the one that is used with tools.)"""
        found = self._tokenizer.chat_template or ""
        return "".join(found.get(name, "") for name in ("default", "tool_use")) if isinstance(found, Mapping) else str(found)

    def conversation(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, object]]) -> str:
        """Write messages by the chat template, up to where the model's turn begins, with these tools beside the policy's own.

        One that has the name of a tool of the policy stands in its place.

        Raises `DatasetError`: there is no template, or it refuses the messages.
        """
        every = list({_name_of(one): one for one in (*(json.loads(self._template.tools) or []), *tools)}.values())
        return self._rendered(self._messages(messages), add_generation_prompt=True, **({"tools": every} if every else {}))

    @property
    def special_texts(self) -> Sequence[str]:
        """The special tokens as they are written in a text."""
        return [str(token) for token in self._tokenizer.all_special_tokens]

    def decode_all(self, ids: list[int]) -> str:
        """Decode tokens, special ones included."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    @functools.cached_property
    def _takes_parts(self) -> bool:
        """Whether the template writes a content of parts as it writes their text; most templates know texts alone."""
        probes: list[object] = ["probe", [{"type": "text", "text": "probe"}]]
        try:
            text, parts = (self._rendered_as_given([{"role": "user", "content": probe}], add_generation_prompt=True) for probe in probes)
        except (TemplateError, ValueError, TypeError):
            return False
        return text == parts

    def encode_target(self, text: str) -> list[int]:
        """Encode a text that follows a prompt, without special tokens. Raises as `encode_prompt` does."""
        _check_whole(text)
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)

    def encode_exchange(self, prompt: Prompt, response: str) -> list[int]:
        """Encode a prompt with its whole response, as a reward model reads them: in the chat template, or with an end token."""
        _check_whole(response)
        if self._chat or not isinstance(prompt, str):
            messages = [*self._messages(prompt), {"role": "assistant", "content": response}]
            return list(self._tokenizer(self._rendered(messages), add_special_tokens=False).input_ids)
        return [*self.encode_prompt(prompt), *self.encode_target(response), self.eos_id]

    def special_among(self, texts: Sequence[str]) -> frozenset[int]:
        """The ids of those of these texts that are special tokens."""
        known = dict(zip(self._tokenizer.all_special_tokens, self._tokenizer.all_special_ids, strict=True))
        return frozenset(int(known[text]) for text in texts if text in known)

    def decode(self, ids: list[int]) -> str:
        """Decode generated tokens, without special tokens."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def save(self, path: str) -> None:
        self._tokenizer.save_pretrained(path)


def load_tokenizer(model: Model) -> TextCodec:
    """Load the tokenizer of the model's directory. Raises `ModelError`."""
    silence_transformers()
    directory = model_directory(model)
    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        raise ModelError(
            f"{directory} has no tokenizer: none of {', '.join(_TOKENIZER_FILES)}",
            now="Save one into it with `tokenizer.save_pretrained(path)`.",
        )
    try:
        tokenizer = _tokenizer_class(directory).from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ModelError(
            f"the tokenizer in {directory} can't be read: {brief(error)}", now="Save it again, or restore the file."
        ) from error
    if model.template.template:
        tokenizer.chat_template = model.template.template
    if model.chat and not tokenizer.chat_template:
        raise ModelError(
            f"chat=True, but the tokenizer in {directory} has no chat template",
            now="Drop chat=True, pass chat_template=..., or add chat_template.jinja to the directory.",
        )
    eos = {tokenizer.eos_token_id, *_generation_eos(directory)} - {None}
    return TextCodec(tokenizer, frozenset(int(token) for token in eos), chat=model.chat, template=model.template)


def model_directory(model: Model) -> Path:
    """Return the model's directory: the given one, that of the hub's cache, or that of the converted .gguf file. Raises `ModelError`."""
    path = Path(model.path).expanduser()
    if is_of_hub(model.path):
        return hub_directory(model, with_weights=True)
    if not path.exists():
        raise ModelError(f"there is no model at {model.path}", now="Give the directory of a Hugging Face model, or a .gguf file.")
    if path.is_file() and path.suffix == ".gguf":
        return converted_directory(path)
    if not path.is_dir():
        raise ModelError(f"{model.path} is neither a directory nor a .gguf file", now="Give the directory that config.json is in.")
    return path


def config_of(model: Model) -> Any:
    """The config of a model, of transformers, to be looked at alone: who asks again gets the same one while the file is the same.

    A plan asks once for each layout that it may offer, thousands of times. Raises `ModelError` as `load_model` does.
    """
    directory = model_directory(model)
    try:
        found = os.stat(directory / "config.json")
    except OSError:
        return config_in(directory)
    return _config_read(directory, (found.st_ino, found.st_mtime_ns, found.st_size))


@functools.lru_cache(maxsize=16)
def _config_read(directory: Path, _of_file: tuple[int, int, int]) -> Any:
    return config_in(directory)


def config_in(directory: Path) -> Any:
    """The config in a model's directory. Raises `ModelError`: there is none that can be read."""
    file = directory / "config.json"
    if not file.is_file():
        raise ModelError(f"{directory} has no config.json", now="Is it the directory of a Hugging Face model?")
    try:
        described = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{file} is not JSON: {error}", now="Restore the file.") from error
    if not isinstance(described, dict) or "model_type" not in described:
        raise ModelError(f"{file} does not say its `model_type`", now="Restore the file.")
    try:
        return transformers.AutoConfig.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ModelError(
            f"{file} describes a {described['model_type']!r} model that this installation can't read: {brief(error)}",
            now=f"transformers here is {transformers.__version__}; a newer one may know it.",
        ) from error


def _tokenizer_class(directory: Path) -> Any:
    # AutoTokenizer goes by the model's type first: for a qwen2 it would build a Qwen2 tokenizer around any tokenizer.json.
    # One that was saved as a generic tokenizer is read as it stands.
    try:
        described = json.loads((directory / "tokenizer_config.json").read_text())
    except FileNotFoundError:
        return transformers.AutoTokenizer
    is_generic = described.get("tokenizer_class") in ("PreTrainedTokenizerFast", "TokenizersBackend")
    return transformers.PreTrainedTokenizerFast if is_generic else transformers.AutoTokenizer


def _generation_eos(directory: Path) -> list[int]:
    file = directory / "generation_config.json"
    if not file.is_file():
        return []
    try:
        eos = json.loads(file.read_text()).get("eos_token_id")
    except (json.JSONDecodeError, AttributeError) as error:
        raise ModelError(f"{file} is not JSON: {error}", now="Restore or delete the file.") from error
    return eos if isinstance(eos, list) else [] if eos is None else [eos]


def silence_transformers() -> None:
    """Keep what transformers says from a worker's output, which belongs to the progress display; what matters is raised as an error."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def brief(error: Exception) -> str:
    """The kind of an error of another library, and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
