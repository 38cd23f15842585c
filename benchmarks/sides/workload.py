"""What both sides of a benchmark do: how many samples of which lengths, on which model and prompts."""

from __future__ import annotations

import random
import string
from dataclasses import dataclass
from pathlib import Path

import tokenizers
import torch
import transformers

_CHARACTERS = string.digits + "+-*/=()., " + string.ascii_lowercase + string.ascii_uppercase + "!\"#$%&':;<>?@[\\]^_`{|}~\n"


@dataclass(frozen=True)
class Workload:
    """GRPO steps on a Qwen2 with random weights, 128 wide, 4 layers, a token for each character."""

    name: str
    num_prompts: int
    n: int
    max_new: int
    vocab: int
    is_full: bool
    """Every response has `max_new` tokens. Else the model ends each by itself: with V tokens the end has a probability of about 1/V
    at each place, so lengths are geometric with mean V and a long tail, cut at `max_new`."""
    trl_micro: int
    """Sequences in TRL's micro-batch, and its attention: the best of those tried."""
    trl_attention: str = "sdpa"

    @property
    def prompt_tokens(self) -> int:
        """24 digits and "="."""
        return 25

    @property
    def num_samples(self) -> int:
        return self.num_prompts * self.n

    def write(self, folder: Path, num_steps: int) -> None:
        """The model, with its weights and tokenizer, and `prompts.txt` with a line for each prompt of all steps: 24 digits and "="."""
        vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *_CHARACTERS[: self.vocab - 3]])}
        assert len(vocabulary) == self.vocab
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = tokenizers.decoders.Fuse()
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
        ).save_pretrained(folder)
        config = transformers.Qwen2Config(
            vocab_size=self.vocab,
            hidden_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            intermediate_size=512,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )
        torch.manual_seed(0)
        transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
        rng = random.Random(0)
        lines = ("".join(rng.choices(string.digits, k=24)) + "=\n" for _ in range(self.num_prompts * num_steps))
        (folder / "prompts.txt").write_text("".join(lines))


FULL = Workload("full", num_prompts=32, n=8, max_new=64, vocab=99, is_full=True, trl_micro=64)
SKEWED = Workload("skewed", num_prompts=16, n=8, max_new=128, vocab=24, is_full=False, trl_micro=32)
