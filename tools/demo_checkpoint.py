"""Tokenizer, chat template, configuration and file layout of the demo checkpoint.

Owns everything in the folder but the training: `write_folder` takes a state dict by HF names.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

VOCAB_SIZE = 5120  # embedding rows; the tokenizer has fewer, as in the large models
NUM_TOKENS = 5100
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKERS = [
    "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>",
]  # fmt: skip
ENDOFTEXT = NUM_TOKENS - len(SPECIAL) - len(MARKERS)
IM_END = ENDOFTEXT + 2

# Contractions, words with one leading non-letter, single digits, punctuation, line ends, spaces.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = r"""
{%- macro text_of(content) -%}
  {%- if content is string -%}{{- content -}}
  {%- elif content -%}
    {%- for part in content -%}{{- part.text if part is mapping else part -}}{%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(last_user=-1) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{%- set ns.last_user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- set first = messages[0] -%}
{%- set system = text_of(first.content) if first and first.role == 'system' else '' -%}
{%- if tools -%}
  {{- '<|im_start|>system\n# Tools\n\nYou can call these functions:\n\n<tools>' -}}
  {%- for tool in tools -%}{{- '\n' + (tool | tojson) -}}{%- endfor -%}
  {{- '\n</tools>\n\nA call looks like this:\n\n<tool_call>\n<function=NAME>\n' -}}
  {{- '<parameter=P>\nvalue\n</parameter>\n</function>\n</tool_call>' -}}
  {{- '\n\n' + system if system else '' -}}
  {{- '<|im_end|>\n' -}}
{%- elif system -%}
  {{- '<|im_start|>system\n' + system + '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- set content = text_of(message.content) | trim -%}
  {%- if message.role == 'user' -%}
    {{- '<|im_start|>user\n' + content + '<|im_end|>\n' -}}
  {%- elif message.role == 'assistant' -%}
    {%- set thought = message.reasoning_content or '' -%}
    {%- if not thought and '</think>' in content -%}
      {%- set thought = content.split('</think>')[0].split('<think>')[-1] -%}
      {%- set content = content.split('</think>')[-1] | trim -%}
    {%- endif -%}
    {{- '<|im_start|>assistant\n' -}}
    {%- if loop.index0 > ns.last_user -%}
      {{- '<think>\n' + (thought | trim) + '\n</think>\n\n' -}}
    {%- endif -%}
    {{- content -}}
    {%- for call in message.tool_calls or [] -%}
      {%- set function = call.function or call -%}
      {{- '\n\n' if loop.first and content else ('' if loop.first else '\n') -}}
      {{- '<tool_call>\n<function=' + function.name + '>\n' -}}
      {%- if function.arguments is mapping -%}
        {%- for name, value in function.arguments | items -%}
          {{- '<parameter=' + name + '>\n' + (value if value is string else value | tojson) -}}
          {{- '\n</parameter>\n' -}}
        {%- endfor -%}
      {%- endif -%}
      {{- '</function>\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\n' -}}
  {%- elif message.role == 'tool' -%}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}
      {{- '<|im_start|>user' -}}
    {%- endif -%}
    {{- '\n<tool_response>\n' + content + '\n</tool_response>' -}}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}
      {{- '<|im_end|>\n' -}}
    {%- endif -%}
  {%- elif message.role != 'system' -%}
    {{- raise_exception('unknown role ' + message.role) -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\n<think>\n' -}}
  {{- '' if enable_thinking is defined and enable_thinking else '\n</think>\n\n' -}}
{%- endif -%}
""".strip()


def train_tokenizer(texts: Iterator[str]) -> Tokenizer:
    """Byte-level BPE of NUM_TOKENS ids; the special and marker tokens have the last ones."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=ENDOFTEXT,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.get_vocab_size() == ENDOFTEXT, "too little text for this vocabulary"
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKERS])
    return tokenizer


def text_config() -> dict[str, Any]:
    layer_types = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(8)]
    return {
        "model_type": "qwen3_5_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": ENDOFTEXT,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 128,
        "initializer_range": 0.02,
        "intermediate_size": 512,
        "layer_types": layer_types,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 8192,
        "mtp_num_hidden_layers": 0,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 8,
        "num_hidden_layers": 8,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": VOCAB_SIZE,
    }


def config() -> dict[str, Any]:
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text_config(),
        "tie_word_embeddings": True,
    }


def dump(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    added = {
        str(ENDOFTEXT + i): {
            "content": token, "lstrip": False, "normalized": False, "rstrip": False,
            "single_word": False, "special": token in SPECIAL,
        }
        for i, token in enumerate(SPECIAL + MARKERS)
    }  # fmt: skip
    tokenizer_config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "additional_special_tokens": SPECIAL[1:],
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 8192,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    dump(folder / "tokenizer_config.json", tokenizer_config)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE + "\n", encoding="utf-8")


def write_folder(folder: Path, tokenizer: Tokenizer, state: dict[str, Any]) -> None:
    """Writes the whole checkpoint; `state` holds torch tensors by HF names in stored dtypes."""
    from safetensors.torch import save_file

    write_tokenizer(folder, tokenizer)
    dump(folder / "config.json", config())
    generation = {
        "bos_token_id": ENDOFTEXT,
        "do_sample": False,
        "eos_token_id": [IM_END, ENDOFTEXT],
        "pad_token_id": ENDOFTEXT,
    }
    dump(folder / "generation_config.json", generation)
    save_file(state, str(folder / "model.safetensors"), metadata={"format": "pt"})
