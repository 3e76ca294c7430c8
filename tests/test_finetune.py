"""train_ray_finetune.py as a user starts it: held to a plain process, exported, reloaded, killed and refused."""

import copy
import itertools
import json
import operator
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from finetune import (
    FINETUNE,
    HEADS,
    SMALL,
    as_on_the_hub,
    assert_answers_as_measured,
    assert_is_as_its_base,
    last_metrics,
    launch,
    load_exported,
    make_tokenizer,
    save_base,
    save_llama,
    tune,
    write_rows,
)
from runs import ROOT, Fork, assert_bit_for_bit, refused_here
from torch.distributed.checkpoint import FileSystemReader

from shared.errors import UsageError
from shared.running.options import Options

RECORDED = ROOT / "tests/recorded_finetune.py"

pytestmark = pytest.mark.usefixtures("no_ray")


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def base(tokenizer, tmp_path_factory) -> Path:
    return save_llama(tmp_path_factory.mktemp("base"), tokenizer)


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> tuple[Path, Path]:
    return write_rows(tmp_path_factory.mktemp("rows"))


LORA = ("--lora-rank", 3, "--lora-alpha", 6, "--lora-targets", "q_proj,v_proj,down_proj")
# 50 rows in batches of 16: the last one has two, in two passes; so two of four ranks get none.
STEPS = ("--precision", "fp64", "--batch-size", 16, "--accumulate", 2, "--epochs", 2, "--seed", 5, "--lr", 1e-2,
    "--num-workers", 0)  # fmt: skip


@pytest.fixture(scope="module", params=[1, 2, 4])
def recorded(request, base, rows, tmp_path_factory) -> dict[str, tuple[dict, list[dict], list[dict], Path]]:
    """What recorded_finetune.py says of a full and a LoRA run in float64: recorded, metrics, peaks; and the export."""
    folder, commands = tmp_path_factory.mktemp(f"ranks{request.param}"), {}
    data = ("--base", base, "--data-file", rows[0], "--val-file", rows[1])
    kinds = [("full", ()), ("lora", (*LORA, "--merge")), ("float32", ("--precision", "fp32"))]
    for name, more in kinds[: 3 if request.param == 2 else 2]:  # float32 for one number of ranks
        files = ("--metrics-out", folder / f"{name}.jsonl", "--export", folder / f"{name}-export")
        commands[name] = [RECORDED, folder / f"{name}.pt", *data, *STEPS, *more, *files]
    launch(request.param, commands)
    return {
        name: (
            torch.load(folder / f"{name}.pt", weights_only=True),
            [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()],
            [json.loads((folder / f"{name}.pt.{rank}.json").read_text()) for rank in range(request.param)],
            folder / f"{name}-export",
        )
        for name in commands
    }


def plain_gradients(base: Path, file: Path, tokenizer, lora: bool, before: list[torch.Tensor]) -> list:
    """Every trainable gradient of the same steps, as a user of transformers computes them: row by row, nothing of ours.

    before: with LoRA, the adapters' first values.
    """
    import peft
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    if lora:
        config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"])
        model = peft.get_peft_model(model, config).double()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with torch.no_grad():
        for parameter, value in zip(parameters, before, strict=True):
            if lora:
                parameter.copy_(value)
            else:
                assert torch.equal(parameter, value)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    optimizer, gradients = torch.optim.AdamW(parameters, lr=1e-2), []
    for epoch in range(2):
        order = torch.randperm(len(lines), generator=torch.Generator().manual_seed(5 + epoch)).tolist()
        for start in range(0, len(lines), 16):
            optimizer.zero_grad()
            total, answer_tokens = 0.0, 0
            for index in order[start : start + 16]:
                user = {"role": "user", "content": lines[index]["prompt"]}
                turns = [user, {"role": "assistant", "content": lines[index]["completion"]}]
                prompt = tokenizer.apply_chat_template([user], add_generation_prompt=True, return_dict=False)
                ids = torch.tensor(tokenizer.apply_chat_template(turns, return_dict=False))
                logits = model(input_ids=ids[None]).logits[0, :-1]
                total = total + F.cross_entropy(logits[len(prompt) - 1 :], ids[len(prompt) :], reduction="sum")
                answer_tokens += len(ids) - len(prompt)
            (total / answer_tokens).backward()
            gradients.append([parameter.grad.clone() for parameter in parameters])
            optimizer.step()
    return gradients


@pytest.mark.parametrize("name", ["full", "lora"])
def test_every_gradient_is_that_of_a_plain_process(name, recorded, base, rows, tokenizer):
    seen, metrics, *_ = recorded[name]
    expected = plain_gradients(base, rows[0], tokenizer, name == "lora", seen["before"])
    assert len(seen["gradients"]) == len(expected) == 8
    for ours, plain in zip(seen["gradients"], expected, strict=True):
        for one, other in zip(ours, plain, strict=True):
            assert one.shape == other.shape
            assert torch.allclose(one, other, rtol=0, atol=1e-9)
    norms = [norm for line in metrics for norm in line["step_grad_norms"]]
    whole = [torch.cat([each.flatten() for each in step]).norm().item() for step in expected]
    assert norms == pytest.approx(whole, rel=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("recorded", [2], indirect=True)
def test_an_export_in_float32_has_the_logits_of_the_run_bit_for_bit(recorded):
    from transformers import AutoModelForCausalLM

    seen, _, _, export = recorded["float32"]
    model = AutoModelForCausalLM.from_pretrained(export)
    assert torch.equal(model(input_ids=torch.arange(40)[None], use_cache=False).logits, seen["logits"])


@pytest.mark.parametrize("name", ["full", "lora"])
def test_bytes(name, recorded, base):
    """State: 16 bytes a weight in float32, here 32; with LoRA 8 a frozen weight. While the base is read and the model
    written: at most a shard, one tensor and a megabyte."""
    from transformers import AutoModelForCausalLM

    seen, metrics, peaks, _ = recorded[name]
    weights = [parameter.numel() for parameter in AutoModelForCausalLM.from_pretrained(base).parameters()]
    trained = sum(value.numel() for value in seen["before"])
    world_size = metrics[0]["world_size"]
    predicted = (32 * trained + (8 * sum(weights) if name == "lora" else 0)) / world_size
    for line in metrics:
        assert line["state_bytes_per_rank"] == pytest.approx(predicted, rel=0.02)
    shard, largest = 8 * sum(weights) / world_size, 8 * max(weights)
    for peak in peaks:
        assert peak["fill"] <= largest + 2**20
        assert peak["export"] <= shard + largest + 2**20


# --- Rows ---------------------------------------------------------------------------------------------------------

CHATML = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)


def test_an_answer_is_each_assistant_turn_and_its_end_token(tokenizer, monkeypatch):
    """With a template that writes a newline after the end token: `generate` never gets to write it."""
    import pairs

    monkeypatch.setattr(tokenizer, "chat_template", CHATML)
    chat = pairs.Chat([{"role": role, "content": text} for role, text in
        [("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four five")]])  # fmt: skip
    tokens, answer = pairs.tokenize_turns(chat, tokenizer)
    written = [tokenizer.decode([token]) for token in tokens]
    assert "".join(written) == (
        "<|user|>\none<|end|>\n<|assistant|>\ntwo<|end|>\n<|user|>\nthree<|end|>\n<|assistant|>\nfour five<|end|>\n"
    )
    parts = "".join(text if counts else "|" for text, counts in zip(written, answer, strict=True))
    assert [part for part in parts.split("|") if part] == ["two<", "end", ">", "four five<", "end", ">"]
    assert len(tokens) == len(answer) and not answer[-1]
    first = pairs.Chat(chat.turns[:2])
    assert pairs.tokenize_turns(("one", "two"), tokenizer) == pairs.tokenize_turns(first, tokenizer)
    chat.turns[1]["weight"] = 0
    without_first = pairs.tokenize_turns(chat, tokenizer)
    assert without_first[0] == tokens and sum(without_first[1]) < sum(answer) and without_first[1][-9:] == answer[-9:]
    first_ends = pairs.end_tokens(torch.tensor(tokens), torch.tensor(answer))
    assert first_ends == {tokens[-1 - answer[::-1].index(True)]}


TEMPLATES = {  # what they write of the turns "one" and "two", and how much of it is the answer
    "phi 3, with an end of text": (
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt or not continued %}<|assistant|>{% endif %}",
        "<|user|>one<|end|><|assistant|>", "two<|end|>", "<|assistant|>",
    ),
    "command a, with two tokens": (
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}"
        "{{ '<|assistant|>' if m.role == 'assistant' }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        "<|user|>one<|end|><|assistant|>", "two<|end|><|assistant|>", "",
    ),
    "gpt-oss, with an end of its own for the last turn": (
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}"
        "{{ '<|assistant|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        "<|user|>one<|end|><|assistant|>", "two<|assistant|>", "",
    ),
    "qwen 3.5, which begins the answer in the prompt": (
        "{% for m in messages %}{{ '<|' + m.role + '|>' + ('<think>' if m.role == 'assistant' else '') + m.content }}"
        "{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}<|assistant|><think>{% endif %}",
        "<|user|>one<|end|><|assistant|><think>", "two<|end|>", "",
    ),
    "a newline as a token": (CHATML, "<|user|>\none<|end|>\n<|assistant|>\n", "two<|end|>", "\n"),
}  # fmt: skip


def test_an_answer_may_begin_with_what_the_template_asks_for_it_with(tokenizer, monkeypatch):
    """As reasoning in the content, where the template's prompt ends with <think>."""
    monkeypatch.setattr(tokenizer, "chat_template", CHATML.replace("<|assistant|>\\n", "<|assistant|>\\n<think>\\n"))
    assert learned(("one", "<think>\n1 + 1\n</think>2"), tokenizer) == ["1 + 1\n</think>2<|end|>"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_of_others(name, tokenizer, tmp_path):
    """What follows the end token does not count, a token or not."""
    from transformers import AutoTokenizer

    import pairs

    template, before, counts, after = TEMPLATES[name]
    tokenizer.save_pretrained(tmp_path)
    other = AutoTokenizer.from_pretrained(tmp_path)
    other.chat_template = template
    if "newline" in name:
        other.add_tokens("\n")
    tokens, answer = pairs.tokenize_turns(("one", "two"), other)
    parts = [other.decode([token for token, marked in zip(tokens, answer, strict=True) if marked is kind])
        for kind in (False, True)]  # fmt: skip
    assert parts == [before + after, counts]


def test_an_answer_may_hold_a_special_token(tokenizer, monkeypatch):
    import pairs

    monkeypatch.setattr(tokenizer, "chat_template", CHATML)
    tokens, answer = pairs.tokenize_turns(("one", "a <|end|> ends a turn"), tokenizer)
    counts = tokenizer.decode([token for token, marked in zip(tokens, answer, strict=True) if marked])
    assert counts == "a <|end|> ends a turn<|end|>"


def test_an_answer_that_its_template_shortens_is_refused(tokenizer, monkeypatch):
    """As some do with what a model has thought in earlier turns."""
    import pairs

    monkeypatch.setattr(tokenizer, "chat_template", CHATML.replace("m.content", "m.content.split('</think>')[-1]"))
    chat = pairs.Chat([{"role": role, "content": text} for role, text in
        [("user", "one"), ("assistant", "well</think>two"), ("user", "three"), ("assistant", "four")]])  # fmt: skip
    with pytest.raises(ValueError, match="the chat template does not write all of an answer"):
        pairs.tokenize_turns(chat, tokenizer)


def test_an_answer_that_begins_with_a_newline_is_cut_from_its_prompt(tokenizer, monkeypatch):
    """Two newlines could be one token, but `generate` is given the first one and writes the second."""
    import pairs

    monkeypatch.setattr(tokenizer, "chat_template", CHATML)
    tokens, answer = pairs.tokenize_turns(("one", "\n    two"), tokenizer)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "one"}], add_generation_prompt=True,
        return_dict=False)  # fmt: skip
    assert tokens[: len(prompt)] == prompt and answer.index(True) == len(prompt)


def test_without_a_template_prompt_and_completion_are_tokenized_apart(tokenizer):
    """As `generate` sees the prompt. "x = " and "1" together would be other tokens."""
    import pairs

    tokens, answer = pairs.tokenize_pair(("x = ", "1"), tokenizer)
    apart = [*tokenizer("x = ")["input_ids"], *tokenizer("1")["input_ids"], tokenizer.eos_token_id]
    assert tokens == apart and sum(answer) == len(tokenizer("1")["input_ids"]) + 1 and answer[-1]


def learned(row: object, tokenizer: object) -> list[str]:
    """Each run of tokens that counts, as text."""
    import pairs

    tokens, answer = pairs.tokenize_turns(row, tokenizer)
    runs = itertools.groupby(zip(tokens, answer, strict=True), key=operator.itemgetter(1))
    return [tokenizer.decode([token for token, _ in run]) for counts, run in runs if counts]


def test_an_answer_that_also_occurs_elsewhere_is_found(tokenizer, monkeypatch):
    """In what the model has thought, which the template writes before it, and in its end token."""
    thinks = CHATML.replace("+ m.content", "+ (m.thoughts or '') + m.content")
    monkeypatch.setattr(tokenizer, "chat_template", thinks)
    import pairs

    for content in ("2", "end", "assistant"):
        turns = [{"role": "user", "content": content}, {"role": "assistant", "thoughts": f"1 + 1: {content}. ",
            "content": content}]  # fmt: skip
        assert learned(pairs.Chat(turns), tokenizer) == [f"1 + 1: {content}. {content}<|end|>"]


TOOLS = (
    "{% if tools %}{{ '<|user|>' + (tools | tojson) + '<|end|>' }}{% endif %}"
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}"
    "{% for call in m.tool_calls or [] %}{{ 'CALL' + (call.function | tojson) }}{% endfor %}{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def test_a_call_of_a_tool_is_an_answer(tokenizer, monkeypatch):
    import pairs

    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2"}, {"role": "assistant", "content": "two"}]  # fmt: skip
    row = pairs.parse_row(json.dumps({"messages": messages, "tools": [{"type": "function"}]}), "")
    monkeypatch.setattr(tokenizer, "chat_template", TOOLS)
    called, said = learned(row, tokenizer)
    assert called.startswith('CALL{"') and called.endswith("}<|end|>") and '"add"' in called and said == "two<|end|>"
    monkeypatch.setattr(tokenizer, "chat_template", TOOLS.replace("m.tool_calls or []", "[]"))
    with pytest.raises(ValueError, match="the chat template does not write all of an answer"):
        learned(row, tokenizer)
    monkeypatch.setattr(tokenizer, "chat_template", CHATML)
    with pytest.raises(ValueError, match='the chat template does not use "tools"'):
        learned(row, tokenizer)


def test_a_call_of_a_tool_may_end_a_chat_and_name_a_tool_that_answers(tokenizer, monkeypatch):
    """With parallel calls, in both of the forms that templates know. (gpt-oss writes the tool's name in its answer.)"""
    import pairs

    calls = [{"name": "add", "arguments": {"a": "b"}}, {"name": "multiply"}]
    turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    named = TOOLS.replace("m.role + '|>'", "m.role + '|>' + (m.name or '')")
    monkeypatch.setattr(tokenizer, "chat_template", named.replace("call.function", "call"))
    expected = 'CALL{"name": "add", "arguments": {"a": "b"}}CALL{"name": "multiply"}<|end|>'
    assert learned(pairs.Chat(turns), tokenizer) == [expected]
    replied = [*turns, {"role": "tool", "name": "multiply", "content": "2"}, {"role": "assistant", "content": "two"}]
    assert learned(pairs.Chat(replied), tokenizer) == [expected, "two<|end|>"]


def test_arguments_that_the_template_would_quote_twice_are_refused(tokenizer, monkeypatch):
    import pairs

    calls = [{"function": {"name": "add", "arguments": '{"a": 1}'}}]
    turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    monkeypatch.setattr(tokenizer, "chat_template", TOOLS)
    with pytest.raises(ValueError, match=r"""does not write all of an answer: '\{"a": 1\}'"""):
        learned(pairs.Chat(turns), tokenizer)
    by_hand = """'{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments + '}'"""
    monkeypatch.setattr(tokenizer, "chat_template", TOOLS.replace("(call.function | tojson)", by_hand))
    assert learned(pairs.Chat(turns), tokenizer) == ['CALL{"name": "add", "arguments": {"a": 1}}<|end|>']


def test_thoughts_that_the_template_ignores_are_refused(tokenizer, monkeypatch):
    import pairs

    turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "2", "reasoning": "1 + 1: 2"}]
    monkeypatch.setattr(tokenizer, "chat_template", CHATML)
    with pytest.raises(ValueError, match='the chat template does not use "reasoning"'):
        learned(pairs.Chat(turns), tokenizer)
    thinks = CHATML.replace("+ m.content", "+ (m.reasoning_content or '') + m.content")
    monkeypatch.setattr(tokenizer, "chat_template", thinks)
    assert learned(pairs.Chat(turns), tokenizer) == ["1 + 1: 22<|end|>"]


def test_a_chat_may_begin_with_the_assistant(tokenizer, monkeypatch):
    import pairs

    turns = [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"}]  # fmt: skip
    monkeypatch.setattr(tokenizer, "chat_template", CHATML)
    assert learned(pairs.Chat(turns), tokenizer) == ["hello<|end|>", "two<|end|>"]
    raises = "{% if messages[0].role == 'assistant' %}{{ raise_exception('the user begins') }}{% endif %}"
    monkeypatch.setattr(tokenizer, "chat_template", raises + CHATML)
    with pytest.raises(Exception, match="the user begins"):
        learned(pairs.Chat(turns), tokenizer)


def test_the_template_for_tools_is_used_where_there_is_one(tokenizer, monkeypatch):
    import pairs

    monkeypatch.setattr(tokenizer, "chat_template", {"default": CHATML, "tool_use": TOOLS})
    turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    assert learned(pairs.Chat(turns), tokenizer) == ["two<|end|>"]
    tokens, _ = pairs.tokenize_turns(pairs.Chat(turns, {"tools": [{"type": "function"}]}), tokenizer)
    assert tokenizer.decode(tokens).startswith('<|user|>[{"type": "function"}]<|end|>')


MARKED = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' }}{% if m.role == 'assistant' %}{% generation %}ANSWER"
    "{% endgeneration %}{{ '\n' }}{% else %}{{ m.content + '<|end|>\n' }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(("answer", "expected"), [
    ("{{ m.content + '<|end|>\n' }}", ["two<|end|>", "four<|end|>"]),
    ("{{ m.content }}{% endgeneration %}{% generation %}<|end|>", ["two<|end|>", "four<|end|>"]),
    ("{{ m.content }}", "the chat template ends an answer without a special token"),
    ("<|end|>", "the chat template does not write all of an answer: 'two' is missing"),
    ("{{ m.content }}{% endgeneration %} {% generation %}<|end|>", "the chat template marks 4 answers in 2 turns"),
])  # fmt: skip
def test_a_template_may_mark_its_answers(answer, expected, tokenizer, monkeypatch):
    import pairs

    monkeypatch.setattr(tokenizer, "chat_template", MARKED.replace("ANSWER", answer))
    chat = pairs.Chat([{"role": role, "content": text} for role, text in
        [("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four")]])  # fmt: skip
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            learned(chat, tokenizer)
    else:
        assert learned(chat, tokenizer) == expected
        chat.turns[1]["weight"] = 0
        assert learned(chat, tokenizer) == expected[1:]


def test_marked_answers_are_those_of_transformers(tokenizer, monkeypatch):
    """Token for token, except that a token never reaches from the prompt into the answer."""
    import pairs

    monkeypatch.setattr(tokenizer, "chat_template", MARKED.replace("ANSWER", "{{ m.content + '<|end|>' }}"))
    for content in ("two words", "<|end|>", "日本 ☃", "\n\ntwo"):
        turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": content}]
        tokens, answer = pairs.tokenize_turns(pairs.Chat(turns), tokenizer)
        theirs = tokenizer.apply_chat_template(turns, return_dict=True, return_assistant_tokens_mask=True)
        assert tokenizer.decode(tokens) == tokenizer.decode(theirs["input_ids"])
        if not content.startswith("\n"):
            assert (tokens, answer) == (theirs["input_ids"], [mask == 1 for mask in theirs["assistant_masks"]])
        assert learned(pairs.Chat(turns), tokenizer) == [content + "<|end|>"]


def test_offsets_without_blanks_do_not_move_an_answer(tokenizer, tmp_path):
    """Llama 3's tokenizer says that a token of blanks begins where it ends."""
    from tokenizers.processors import ByteLevel
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(tmp_path)
    other = AutoTokenizer.from_pretrained(tmp_path)
    other.chat_template = CHATML.replace("|>\\n'", "|> '")
    other.backend_tokenizer.post_processor = ByteLevel(trim_offsets=True)
    assert other("a ", return_offsets_mapping=True)["offset_mapping"][-1] == (2, 2)
    for content in ("two", " two", "\ntwo", "x = 1"):
        assert learned(("one", content), other) == [content + "<|end|>"]


def test_a_tokenizer_that_begins_each_text_with_a_blank():
    """As those of Llama 2 and Mistral do. The answer begins in the middle of a text, and gets none."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    import pairs

    letters = ["<s>", "</s>", "<unk>", "▁", *"abcdefghijklmnopqrstuvwxyz{}=:1\n", "▁x", "▁="]
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    inner = Tokenizer(models.BPE(vocabulary, [("▁", "x"), ("▁", "=")], unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    inner.decoder = decoders.Metaspace(prepend_scheme="always")
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )  # fmt: skip
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokens, answer = pairs.tokenize_pair(("x =\n", "{a: 1}"), tokenizer)
    parts = ["".join(letters[token] for token, counts in zip(tokens, answer, strict=True) if counts is kind)
        for kind in (False, True)]  # fmt: skip
    assert parts == ["<s>▁x▁=\n", "{a:▁1}</s>"]
    with pytest.raises(ValueError, match="end the prompt before a blank, not after it"):
        pairs.tokenize_pair(("x ", "= 1"), tokenizer)
    tokens, answer = pairs.tokenize_pair(("", "x = 1"), tokenizer)  # after <s> alone
    assert tokens[0] == 0 and tokens.index(1) == len(tokens) - 1 and answer == [False, *[True] * (len(tokens) - 1)]


def test_a_tokenizer_in_python_takes_pairs_and_refuses_chats(monkeypatch):
    """ByT5's has a token per byte, and ends each text with </s>."""
    from transformers import ByT5Tokenizer

    import pairs

    tokenizer = ByT5Tokenizer()
    tokens, answer = pairs.tokenize_pair(("ab", "c"), tokenizer)
    assert tokenizer.convert_ids_to_tokens(tokens) == ["a", "b", "c", "</s>"] and answer == [False, False, True, True]
    monkeypatch.setattr(tokenizer, "chat_template", CHATML)
    with pytest.raises(ValueError, match="a chat needs a tokenizer that says where its tokens are"):
        pairs.tokenize_turns(("ab", "c"), tokenizer)


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer, monkeypatch):
    import pairs

    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages | length }}" + CHATML)
    with pytest.raises(ValueError, match="begins an answer in one way, and asks for it in another"):
        pairs.tokenize_turns(("one", "two"), tokenizer)


def test_a_tenth_is_for_validation_and_equal_prompts_stay_together():
    import pairs

    rows = [(f"line {number}", (f"prompt {number % 70}", f"answer {number}")) for number in range(200)]
    train, val = pairs.split(rows)
    assert sorted(train + val) == sorted(rows) and 18 <= len(val) <= 20
    assert not {prompt for _, (prompt, _) in train} & {prompt for _, (prompt, _) in val}
    assert pairs.split(rows) == (train, val)


def test_a_prompt_of_most_rows_does_not_become_the_validation_set():
    import pairs

    often = [(f"line {number}", ("often", f"answer {number}")) for number in range(90)]
    once = [(f"line {number}", (f"prompt {number}", "answer")) for number in range(10)]
    train, val = pairs.split(often + once)
    assert len(val) == 1 and len(train) == 99
    train, val = pairs.split(often[:20] + [(place, ("too", answer)) for place, (_, answer) in often[:19]])
    assert (len(train), len(val)) == (20, 19)  # no prompt has less than a tenth


def test_a_run_says_what_it_learns_from(exported, tokenizer):
    said = exported[1]["llama"]
    assert "[driver] 50 rows to train on, 10 to validate with\n" in said
    (first,) = [line for line in said.splitlines() if "double brackets: " in line]
    assert first.count("[[") == 1 and first.endswith("<|end|>]]") and "<|user|>" in first.partition("[[")[0]


# --- Exported, and loaded in another process ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def exported(base, rows, tmp_path_factory) -> tuple[Path, dict[str, str]]:
    """(folder, what was said) of runs that were tuned on two ranks and exported into FOLDER/NAME."""
    import tiny_base

    folder, lora = tmp_path_factory.mktemp("exported"), ["--lora-rank", 4]
    dropout = [*lora, "--lora-dropout", 0.3, "--epochs", 4]
    options = {
        "llama": [], "adapter": lora, "merged": [*lora, "--merge", "--activation-checkpointing"], "dropout": dropout,
        "dropout, evaluated": [*dropout, "--eval-every-steps", 2],
    }  # fmt: skip
    commands = {name: tune(base, rows, folder / name, *more) for name, more in options.items()}
    commands["odd"] = tune(with_foreign_settings(base, folder / "odd-base"), rows, folder / "odd")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_base, "STEPS", 2)  # its weights are of no matter here
        for each in (tiny_base.PAIRS[0], tiny_base.BASE):
            tiny_base.make(folder / "data", each)
    own = ["--data-dir", folder / "data", "--max-steps", 3, "--num-workers", 0, "--export", folder / "own"]
    commands["own"] = [FINETUNE, *own, "--metrics-out", folder / "own.jsonl"]
    return folder, launch(2, commands)


@pytest.mark.parametrize("name", ["llama", "adapter"])
def test_an_export_answers_as_the_run_has_measured(name, exported, rows):
    """(Other architectures: all/test_finetune_architectures.py.)"""
    assert_answers_as_measured(exported[0] / name, rows[1], adapter=name == "adapter")


def test_an_export_is_as_its_base(exported, base):
    assert_is_as_its_base(exported[0] / "llama", base)


def with_foreign_settings(base: Path, folder: Path) -> Path:
    """A base as others leave it: with settings of what its model returns, another end, and files of other models."""
    damaged(base, folder, output_hidden_states=True, output_attentions=True, eos_token_id=5)
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 6], "num_beams": 4, "temperature": 0.5}')
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (folder / "trainer_state.json").write_text("{}")
    (folder / "LICENSE").write_text("free")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/rag.jinja").write_text("{{ messages }}")
    return folder


def test_an_export_holds_what_describes_it_and_stops_where_its_answers_end(exported, tokenizer):
    folder = exported[0] / "odd"
    assert {path.name for path in folder.iterdir()} == {
        "LICENSE", "additional_chat_templates", "chat_template.jinja", "config.json", "generation_config.json",
        "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert (folder / "additional_chat_templates/rag.jinja").is_file()
    settings = json.loads((folder / "generation_config.json").read_text())
    assert settings == {"eos_token_id": [5, 6, tokenizer.eos_token_id], "num_beams": 4, "temperature": 0.5}
    assert last_metrics(folder)["step_losses"] == last_metrics(exported[0] / "llama")["step_losses"]
    base, llama = (exported[0] / f"{name}/generation_config.json" for name in ("odd-base", "llama"))
    assert json.loads(base.read_text())["eos_token_id"] == [5, 6]
    assert json.loads(llama.read_text())["eos_token_id"] == tokenizer.eos_token_id


@torch.no_grad()
def test_a_merged_export_is_base_and_adapter_in_one(exported):
    """The run is that of the adapter, bit for bit also with activations recomputed, and the sums differ in rounding."""
    tokens = torch.randint(3, 1024, (2, 20), generator=torch.Generator().manual_seed(0))
    adapter, merged = exported[0] / "adapter", exported[0] / "merged"
    assert last_metrics(adapter)["step_losses"] == last_metrics(merged)["step_losses"]
    both, merged = load_exported(adapter, adapter=True)[0], load_exported(merged)[0]
    assert torch.allclose(both(input_ids=tokens).logits, merged(input_ids=tokens).logits, rtol=0, atol=1e-5)


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_merge_says_how_much_of_the_update_its_rounding_takes(base, one_rank):
    """On one shard; two ranks and the line that is printed: all/test_finetune_architectures.py."""
    import peft
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    import pretrained

    def merge(size: float, dtype: torch.dtype) -> tuple[tuple[float, float], tuple[float, float]]:
        """What merge() says, and the same by plain tensors, for adapters whose B has elements of this size."""
        inner = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).float()  # what bfloat16 can hold
        model = peft.get_peft_model(inner, peft.LoraConfig(r=2, target_modules="all-linear"))
        torch.manual_seed(0)
        for name, each in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(each, std=size) if size else torch.nn.init.zeros_(each)
        modules = {name: each for name, each in inner.named_modules() if hasattr(each, "lora_A")}
        before = {name: each.get_base_layer().weight.detach().clone() for name, each in modules.items()}
        updates = {name: each.get_delta_weight("default").detach() for name, each in modules.items()}
        fully_shard(inner)
        said = pretrained.merge(model, {f"{name}.weight": ([], dtype) for name in modules})
        after = {name: each.get_base_layer().weight.full_tensor() for name, each in modules.items()}
        assert {each.dtype for each in after.values()} == {dtype}
        as_before = torch.cat([(after[name] == before[name].to(dtype)).flatten() for name in modules])
        errors = torch.cat([(after[name].float() - before[name] - updates[name]).flatten() for name in modules])
        length = torch.cat([each.flatten() for each in updates.values()]).norm()
        return said, (as_before.float().mean().item(), (errors.norm() / length).item())

    seen = []
    for size in (1e-1, 1e-3, 1e-5):
        said, expected = merge(size, torch.bfloat16)
        assert said == pytest.approx(expected, rel=1e-3)
        seen.append(said)
    shares, errors = zip(*seen, strict=True)
    assert list(shares) == sorted(shares) and errors[0] < 0.1 and errors[2] > 0.5
    assert merge(1e-2, torch.float32)[0][1] < 1e-4
    assert merge(0, torch.bfloat16)[0] == (1, 0)  # an adapter that was never trained


def test_evaluations_and_answers_change_nothing_that_training_draws(exported):
    """With dropout, in all ranks' random numbers; the last evaluation is the one at the end of the epoch."""
    quiet, evaluated, adapter = (
        last_metrics(exported[0] / name) for name in ("dropout", "dropout, evaluated", "adapter")
    )
    assert quiet["step_losses"] == evaluated["step_losses"] and quiet["val_loss"] == evaluated["val_loss"]
    assert quiet["step_losses"] != adapter["step_losses"]
    assert "evaluations" not in quiet and [each["step"] for each in evaluated["evaluations"]] == [10]


def test_state_in_float32_takes_16_bytes_a_trained_weight_and_4_a_frozen_one(exported, base):
    from transformers import AutoModelForCausalLM

    weights = AutoModelForCausalLM.from_pretrained(base).num_parameters()
    adapters = 2 * 4 * (4 * 32 + 2 * (32 + 16) + 3 * (32 + 64))  # A: blocks x rank x (in + out) of q, o, k, v and MLP
    for name, whole in (("llama", 16 * weights), ("adapter", 4 * weights + 16 * adapters)):
        assert last_metrics(exported[0] / name)["state_bytes_per_rank"] == pytest.approx(whole / 2, rel=0.02)


@pytest.mark.parametrize(("options", "lr"), [
    ((), 1e-3),
    (("--lora-rank", "8"), 1e-2),
    (("--base", "elsewhere"), 2e-5),
    (("--base", "elsewhere", "--lora-rank", "8"), 2e-4),
    (("--lora-rank", "8", "--lr", "0.5"), 0.5),
])  # fmt: skip
def test_the_default_learning_rate(options, lr):
    import pairs
    from shared.on_ray.options import ray_parser

    assert ray_parser("", (pairs.PairTask,)).parse_args(options).lr == pytest.approx(lr)


def test_the_default_base_and_rows(exported, capsys):
    """They are made once, no line of Python is in both files, and an export is a base of the same kind."""
    import pretrained
    import tiny_base

    folder, said = exported
    base, export = folder / "data/tiny-llama", folder / "own"
    assert pretrained.weight_files(export) == pretrained.weight_files(base)
    train, val = (
        [json.loads(line)["prompt"] for line in (base.parent / name).read_text().splitlines()]
        for name in tiny_base.PAIRS
    )
    assert len(set(train)) == len(train) > 4000 and len(set(val)) == len(val) > 1000 and not set(train) & set(val)
    assert last_metrics(export)["samples_seen"] == 3 * 64 and "' -> '" in said["own"]
    tiny_base.make(base.parent, tiny_base.BASE)
    assert capsys.readouterr().out == ""


# --- Killed, and resumed with something else ----------------------------------------------------------------------


def edit(name: str, **values: object):
    """A change of values in one of a base's JSON files."""

    def change(folder: Path) -> None:
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | values))

    return change


def change_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{# another #}" + (folder / "chat_template.jinja").read_text())


CHANGES = (
    ("rope", edit("config.json", rope_parameters={"rope_theta": 2e4, "rope_type": "default"}),
     "a different config.json in --base"),
    ("tokenizer", edit("tokenizer_config.json", pad_token="<|user|>"), "a different tokenizer in --base"),
    ("template", change_template, "a different chat template in --base"),
)  # fmt: skip


def test_what_is_no_change_of_a_base_leaves_its_checksums(base, tokenizer, tmp_path):
    """Another folder, versions, paths, the order of keys, Windows line ends, a template in tokenizer_config.json."""
    import pretrained

    folder = damaged(base, tmp_path / "other")
    edit("config.json", transformers_version="4.1.0", _name_or_path="me/base", torch_dtype="float16")(folder)
    for path in folder.glob("*.json"):
        values = json.loads(path.read_text())
        text = json.dumps(dict(reversed(values.items())), indent=4)
        path.write_bytes(text.replace("\n", "\r\n").encode("utf-8"))
    assert pretrained.contents(folder) == pretrained.contents(base)
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    edit("tokenizer_config.json", chat_template=template.replace("\n", "\r\n"))(folder)
    assert pretrained.contents(folder) == pretrained.contents(base)
    (folder / "special_tokens_map.json").write_text("{")
    with pytest.raises(ValueError, match=r"special_tokens_map\.json is damaged: Expecting property name"):
        pretrained.contents(folder)


def test_other_rows_for_validation_are_known(rows, monkeypatch, tmp_path):
    """The same file, divided in another way, as by an earlier version of `split`."""
    import pairs

    def known_by(data_file: object = rows[0], val_file: object = None) -> str:
        return pairs.validation_checksum(Options(data_file=str(data_file), val_file=val_file))

    before, with_file = known_by(), known_by(val_file=rows[1])
    shutil.copy(rows[0], tmp_path / "copy.jsonl")
    assert known_by(tmp_path / "copy.jsonl") == before != with_file
    windows = tmp_path / "windows.jsonl"
    windows.write_bytes(rows[1].read_bytes().replace(b"\n", b"\r\n"))
    assert windows.read_bytes() != rows[1].read_bytes() and known_by(val_file=windows) == with_file
    assert pairs.file_checksum(windows) == pairs.file_checksum(rows[1])
    monkeypatch.setattr(pairs, "split", lambda rows: (rows[5:], rows[:5]))
    assert known_by() != before


def test_a_killed_worker_leaves_no_trace(base, rows, on_cluster, tmp_path):
    """Two workers with dropout and accumulation: one is killed between two saves, and the metrics, all steps' losses
    and norms, are those of the undisturbed run, bit for bit. The checkpoint holds adapters and no base.
    """
    options = ["--base", base, "--data-file", rows[0], "--val-file", rows[1], "--batch-size", 8, "--accumulate", 2,
        "--lora-rank", 4, "--lora-dropout", 0.2, "--epochs", 8, "--save-every-steps", 5, "--warmup-steps", 10,
        "--max-grad-norm", 0.5]  # fmt: skip
    (tmp_path / "undisturbed").mkdir()
    undisturbed = Fork(2, tmp_path / "undisturbed", *options, "--num-workers", 0, script=FINETUNE)
    run = Fork(0, tmp_path, *options, "--num-workers", 2, "--run-name", "run", script=FINETUNE)
    run.wait_for(tmp_path, "run/checkpoint-00000007-*")  # the second: so the first one is complete
    run.ray_processes("RayTrainWorker")[-1].kill()
    assert run.finish() == 0, run.text
    assert undisturbed.finish() == 0, undisturbed.text
    assert run.text.count("continuing after step") == 1, run.text
    assert_bit_for_bit(run.metrics(), undisturbed.metrics())
    newest = max((tmp_path / "run").glob("checkpoint-*"))
    saved = [key for key in FileSystemReader(newest).read_metadata().state_dict_metadata if key.startswith("model.")]
    assert len(saved) == 28 and all(".lora_" in key for key in saved)  # A and B of 7 layers in 2 blocks
    other = damaged(base, tmp_path / "other")
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    again = [*options, "--storage-path", tmp_path, "--run-name", "run", "--resume"]
    error = refused_here(FINETUNE, *again, "--base", other)
    assert "was written with different weights in --base: resume with the old one, or begin a new run with" in error
    for name, change, because in CHANGES:
        folder = damaged(base, tmp_path / name)
        change(folder)
        assert f"was written with {because}: resume" in refused_here(FINETUNE, *again, "--base", folder)
    assert "was written with a different --data-file: resume" in refused_here(FINETUNE, *again, "--data-file", rows[1])
    error = refused_here(FINETUNE, *again, "--val-file", rows[0])
    assert "was written with different validation rows: resume" in error
    assert "is of --lora-alpha 8.0, but" in refused_here(FINETUNE, *again, "--lora-alpha", 9)
    error = refused_here(FINETUNE, *again, "--lora-rank", 2)
    assert "is of --lora-rank 4, but this run asks for --lora-rank 2" in error


# --- Refused ------------------------------------------------------------------------------------------------------


def damaged(base: Path, folder: Path, drop: str = "", **config: object) -> Path:
    """A copy of the base without the files that match `drop`, and with other values in config.json."""
    shutil.copytree(base, folder)
    for path in folder.glob(drop or "no file"):
        path.unlink()
    if config:
        values = json.loads((folder / "config.json").read_text()) | config
        (folder / "config.json").write_text(json.dumps(values))
    return folder


def without_tensor(base: Path, folder: Path) -> Path:
    from safetensors.torch import load_file, save_file

    path = damaged(base, folder) / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def with_bytes(base: Path, folder: Path, change) -> Path:
    path = damaged(base, folder) / "model.safetensors"
    path.write_bytes(change(path.read_bytes()))
    return folder


def with_pickle(base: Path, folder: Path) -> Path:
    (damaged(base, folder, "*.safetensors") / "pytorch_model.bin").write_bytes(b"")
    return folder


def with_template(base: Path, folder: Path, template: str) -> Path:
    (damaged(base, folder) / "chat_template.jinja").write_text(template)
    return folder


def adapter_folder(base: Path, folder: Path) -> Path:
    (damaged(base, folder, "config.json") / "adapter_config.json").write_text("{}")
    return folder


def several_files(base: Path, folder: Path, missing: str) -> Path:
    from transformers import AutoModelForCausalLM

    damaged(base, folder, "model.safetensors")
    AutoModelForCausalLM.from_pretrained(base).save_pretrained(folder, max_shard_size="60KB")
    (folder / missing).unlink()
    return folder


def with_settings(base: Path, folder: Path, text: str) -> Path:
    damaged(base, folder)
    (folder / "generation_config.json").write_text(text)
    return folder


def with_a_head(base: Path, folder: Path) -> Path:
    """A base that says that its head is the embedding, with a head of its own in the file."""
    from safetensors.torch import load_file, save_file

    weights = load_file(damaged(base, folder) / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["lm_head.weight"][-1, -1] += 1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def mixtral(folder: Path, tokenizer) -> Path:
    """A base whose tensors transformers merges."""
    from transformers import MixtralConfig

    return save_base(folder, MixtralConfig(**SMALL, **HEADS, num_local_experts=2), tokenizer)


def with_sentencepiece(base: Path, folder: Path) -> Path:
    """A base with Llama 2's own tokenizer file alone."""
    (damaged(base, folder, "tokenizer.json") / "tokenizer.model").write_bytes(b"")
    return folder


def with_tensor(base: Path, folder: Path, name: str, value: torch.Tensor) -> Path:
    """A base with one tensor more, or with another one."""
    from safetensors.torch import load_file, save_file

    weights = load_file(damaged(base, folder) / "model.safetensors") | {name: value}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system turns') }}{% endif %}{% endfor %}"
)

OWN_CODE = {"AutoConfig": "configuration.Mine", "AutoModelForCausalLM": "model.Mine"}

BASES = {
    "no folder": (lambda base, folder, _: folder, "is not a folder, and every node needs it. Download a model of the"),
    "no config": (lambda base, folder, _: damaged(base, folder, "config.json"), "has no config.json"),
    "an adapter": (lambda base, folder, _: adapter_folder(base, folder), "an adapter: export with --merge instead"),
    "no tokenizer": (lambda base, folder, _: damaged(base, folder, "token*"), "has no tokenizer"),
    "a pickle": (lambda base, folder, _: with_pickle(base, folder), "holds only pytorch_model.bin, a pickle"),
    "no weights": (lambda base, folder, _: damaged(base, folder, "*.safetensors"), "holds no weights"),
    "own code": (
        lambda base, folder, _: damaged(base, folder, auto_map=OWN_CODE, architectures=["Mine"]),
        "brings its own Python code (auto_map in config.json), which is never run here",
    ),
    "own code of an unknown kind": (
        lambda base, folder, _: damaged(base, folder, auto_map=OWN_CODE, model_type="mine", architectures=None),
        "brings its own Python code (auto_map in config.json), which is never run here",
    ),
    "half a tokenizer": (
        lambda base, folder, _: with_sentencepiece(base, folder),
        "has a tokenizer.model and no tokenizer.json: transformers makes one of it with the package sentencepiece",
    ),
    "a tensor in eight bits": (
        lambda base, folder, _: with_tensor(base, folder, "model.norm.weight", torch.ones(32, dtype=torch.int8)),
        "model.norm.weight is quantized, or not a number",
    ),
    "a tensor too many": (
        lambda base, folder, _: with_tensor(base, folder, "model.norm.bias", torch.ones(32)),
        "holds model.norm.bias, which LlamaForCausalLM does not have",
    ),
    "an encoder": (
        lambda base, folder, _: damaged(base, folder, architectures=["BertForMaskedLM"], model_type="bert"),
        "holds BertForMaskedLM, which is not a decoder that writes text",
    ),
    "quantized": (
        lambda base, folder, _: damaged(base, folder, quantization_config={"quant_method": "gptq", "bits": 4}),
        "is quantized",
    ),
    "a missing file": (
        lambda base, folder, _: several_files(base, folder, "model-00002-of-00003.safetensors"),
        "lacks model-00002-of-00003.safetensors, which model.safetensors.index.json names",
    ),
    "cut off": (
        lambda base, folder, _: with_bytes(base, folder, lambda old: old[:-9]),
        "model.safetensors is damaged or cut off",
    ),
    "a damaged header": (
        lambda base, folder, _: with_bytes(base, folder, lambda old: old[:20] + b"#" + old[21:]),
        "is damaged or cut off",
    ),
    "a missing tensor": (lambda base, folder, _: without_tensor(base, folder), "lacks model.norm.weight"),
    "another shape": (
        lambda base, folder, _: damaged(base, folder, intermediate_size=96),
        "mlp.gate_proj.weight is [64, 32], but config.json says [96, 32]",
    ),
    "damaged settings": (
        lambda base, folder, _: with_settings(base, folder, "[5"),
        "generation_config.json is damaged: ",
    ),
    "a tied head that differs": (
        lambda base, folder, _: with_a_head(base, folder),
        "config.json says that lm_head.weight is model.embed_tokens.weight, but the stored two differ",
    ),
    "Mixtral": (lambda base, folder, tokenizer: mixtral(folder, tokenizer), "transformers merges tensors of this"),
    "no end of a turn": (
        lambda base, folder, _: with_template(base, folder, "{% for m in messages %}{{ loop.length }}{% endfor %}"),
        "train.jsonl, line 1: ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BASES)
def test_a_base_is_refused_in_one_line(name, base, rows, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("pretrained.is_sentencepiece_available", lambda: False)  # whether sentencepiece is installed
    make, because = BASES[name]
    folder = make(base, tmp_path / "base", tokenizer)
    options = ["--base", folder, "--data-file", rows[0], "--storage-path", tmp_path / "runs"]
    assert because in refused_here(FINETUNE, *options)
    assert not (tmp_path / "runs").exists()


NATIVE = {
    "two names": lambda base, folder, _: damaged(base, folder, architectures=["Mine", "LlamaForCausalLM"]),
    "code of a native class": lambda base, folder, _: damaged(base, folder, auto_map=OWN_CODE),
    "frequencies of an early Llama": lambda base, folder, _: with_tensor(
        base, folder, "model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(4)
    ),
    "the Hub's own GPT-2": lambda base, folder, tokenizer: hub_gpt2(folder, tokenizer),
}  # fmt: skip


def hub_gpt2(folder: Path, tokenizer) -> Path:
    from transformers import GPT2Config

    config = GPT2Config(vocab_size=1024, n_embd=32, n_layer=2, n_head=4, n_positions=128)
    return as_on_the_hub(save_base(folder, config, tokenizer))


@pytest.mark.parametrize("name", NATIVE)
def test_a_base_that_transformers_reads_is_read(name, base, tokenizer, one_rank, tmp_path):
    """No code of the folder is run, and every weight is the one that `from_pretrained` reads."""
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    import pretrained

    folder = NATIVE[name](base, tmp_path / "base", tokenizer)
    args = Options(base=str(folder), lora_rank=0, precision="fp32", activation_checkpointing=False)
    model = pretrained.build(args, torch.float32)
    pretrained.check_copies(model, folder)
    fully_shard(model)
    model.to_empty(device="cpu")
    pretrained.fill(model, str(folder), seed=0)
    expected = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False).state_dict()
    found = {key: value.full_tensor() for key, value in model.state_dict().items()}
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)


def test_an_export_does_not_ask_for_code_of_its_base(base, rows, tmp_path):
    """The class is in transformers, and the code is not copied."""
    folder = damaged(base, tmp_path / "base", auto_map=OWN_CODE)
    launch(1, {"tuned": tune(folder, rows, tmp_path / "tuned")})
    assert_is_as_its_base(tmp_path / "tuned", base)


def test_a_run_says_which_experts_get_no_adapters(tokenizer, tmp_path):
    """gpt-oss: all experts of a block are one tensor."""
    from transformers import GptOssConfig

    import pretrained

    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "max_position_embeddings": 128}
    folder = save_base(tmp_path / "base", GptOssConfig(**SMALL, **HEADS, **experts), tokenizer)
    args = Options(base=str(folder), lora_rank=2, precision="fp32", activation_checkpointing=False, lora_alpha=4.0,
        lora_dropout=0.0, lora_targets=[pretrained.ALL_LINEAR])  # fmt: skip
    assert pretrained.without_adapters(pretrained.build(args, torch.float32)) == [
        "mlp.experts.down_proj",
        "mlp.experts.gate_up_proj",
    ]


PAIR = '{"prompt": "a", "completion": "b"}'


@pytest.mark.parametrize(("line", "because"), [
    ("{", "line 2: not JSON, with one row per line"),
    ("[1]", 'line 2: a row is {"prompt": ..., "completion": ...} or {"messages": [...]}'),
    ('{"prompt": "a"}', 'line 2: "completion" is missing, or is not text'),
    ('{"prompt": 1, "completion": "b"}', 'line 2: "prompt" is missing, or is not text'),
    ('{"prompt": "a", "completion": " "}', "line 2: the completion is empty"),
    ('{"messages": [{"role": "user"}]}', 'line 2: "messages" is a list of'),
    ('{"messages": [{"role": "user", "contnet": "a"}]}', 'line 2: "contnet" is not used; is "content" meant?'),
    ('{"messages": [{"role": "assistant", "content": "a", "wieght": 0}]}', '"wieght" is not used; is "weight" meant?'),
    ('{"prompt": "a", "completion": "b", "weight": 0}', '"weight" belongs to a turn'),
    ('{"messages": [{"role": "user", "content": "a"}]}', "line 2: there is no answer, a turn of the assistant"),
    ('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "tools": [{}]}',
     "line 2: the chat template does not use"),
    ('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]}',
     "line 2: there is no answer, a turn of the assistant"),
    ('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 2}]}',
     'line 2: the "weight" of turn 2 is 2; it can be 0 or 1'),
    ('{"prompt": "a", "completion": "b", "images": ["c"]}', 'line 2: "images" would change what is learned'),
    ('{"prompt": "a", "completion": "b", "tools": [{}]}', 'line 2: "tools" goes with "messages"'),
    ('{"messages": [], "tools": "[]"}', 'line 2: "tools" is not a list of objects'),
    ('{"messages": [], "chat_template_kwargs": ["a"]}', 'line 2: "chat_template_kwargs" is not an object'),
    ('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": ["b"]}]}',
     'line 2: "messages" is a list of'),
    ('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": null}]}',
     'line 2: "messages" is a list of'),
    ('{"messages": [{"role": "assistant", "content": ""}, {"role": "assistant", "content": "b"}]}',
     "line 2: a turn of the assistant is empty"),
    ('{"prompt": "c", "completion": "\\ud800"}', "line 2: "),
    (json.dumps({"prompt": "x" * 999, "completion": "b"}), "tokens, but the model takes 128"),
])  # fmt: skip
def test_a_row_is_refused_with_its_line(line, because, base, tmp_path):
    (tmp_path / "rows.jsonl").write_text(f"{PAIR}\n{line}\n")
    error = refused_here(FINETUNE, "--base", base, "--data-file", tmp_path / "rows.jsonl")
    assert "rows.jsonl, line 2: " in error and because in error


def test_a_turn_that_the_template_leaves_out_is_refused(tokenizer):
    """Such as one of a role that is misspelt, or of the system. What a tool says may be written as JSON."""
    import pairs

    template = "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}<|user|>{{ m.content }}{{ eos_token }}"
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template + "{% elif m.role == 'tool' %}{{ m.content | tojson }}{% endif %}{% endfor %}"
    answer = {"role": "assistant", "content": "c"}
    for role in ("usr", "system"):
        row = pairs.Chat([{"role": "user", "content": "a"}, {"role": role, "content": "first"}, answer])
        with pytest.raises(ValueError, match=f'leaves out turn 2, of the role "{role}"'):
            pairs.tokenize_turns(row, tokenizer)
    pairs.tokenize_turns(pairs.Chat([{"role": "tool", "content": 'say "é"'}, answer]), tokenizer)


def test_a_row_may_say_that_it_has_no_turns():
    import pairs

    assert pairs.parse_row('{"messages": null, "prompt": "a", "completion": "b", "tools": []}', "") == ("a", "b")


def test_more_of_the_rows_are_refused(base, rows, tokenizer, tmp_path):
    from transformers import LlamaConfig

    file = tmp_path / "rows.jsonl"
    file.write_text(f"{PAIR}\n{PAIR}\n")
    assert "needs at least two different prompts" in refused_here(FINETUNE, "--base", base, "--data-file", file)
    file.write_bytes(b"\xff\xfe")
    assert "is not text in UTF-8" in refused_here(FINETUNE, "--base", base, "--data-file", file)
    file.write_text("")
    assert "holds no rows" in refused_here(FINETUNE, "--base", base, "--data-file", file)
    assert "cannot read the rows in" in refused_here(FINETUNE, "--base", base, "--data-file", tmp_path / "none.jsonl")
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    file.write_text(json.dumps({"messages": chat}) + f"\n{PAIR}\n")
    folder = with_template(base, tmp_path / "no system", SYSTEM)
    assert "line 1: no system turns" in refused_here(FINETUNE, "--base", folder, "--data-file", file)
    folder = damaged(base, tmp_path / "no template", "chat_template.jinja")
    empty = tmp_path / "empty.jsonl"
    empty.write_text(f'{PAIR}\n{{"prompt": "", "completion": "b"}}\n')
    assert "line 2: the prompt is empty" in refused_here(FINETUNE, "--base", folder, "--data-file", empty)
    error = refused_here(FINETUNE, "--base", folder, "--data-file", file)
    assert 'line 1: "messages" need a chat template, and this tokenizer has none' in error
    config = LlamaConfig(**SMALL | {"vocab_size": 300}, **HEADS)
    error = refused_here(FINETUNE, "--base", save_base(tmp_path / "few", config, tokenizer), "--data-file", rows[0])
    assert "is beyond the model's 300 embeddings" in error


@pytest.mark.parametrize(("values", "because"), [
    ({"hidden_size": "x"}, "config.json cannot be used"),
    ({"num_attention_heads": 0}, "config.json cannot be used"),
    ({"hidden_act": "none"}, "config.json cannot be used"),
    ({"architectures": None, "model_type": "vit"}, "holds vit, which is not a decoder"),
    ({"architectures": ["BertLMHeadModel"], "model_type": "bert"}, "holds BertLMHeadModel, which is not a decoder"),
])  # fmt: skip
def test_a_wrong_value_in_the_configuration_is_refused(values, because, base, rows, tmp_path):
    folder = damaged(base, tmp_path / "base", **values)
    assert because in refused_here(FINETUNE, "--base", folder, "--data-file", rows[0])


def test_a_node_with_other_weights_is_refused(base):
    import pretrained
    from shared.distributed import Worker

    args, weights = Options(base=str(base)), {"base": f"with weights {pretrained.checksum(base)}"}
    run = Options(options=weights, patience_s=0)
    pretrained.check_same_base(args, run, Worker())
    run = Options(options={"base": "with weights 0"}, patience_s=0)
    pretrained.check_same_base(args, run, Worker(rank=1, local_rank=1))  # its node's first process has done it
    with pytest.raises(ValueError, match=r"has different weights in --base .* than the driver"):
        pretrained.check_same_base(args, run, Worker())
    run = Options(options={**weights, "base_config": "0"}, patience_s=0)
    with pytest.raises(ValueError, match=r"has a different config\.json in --base"):
        pretrained.check_same_base(args, run, Worker())


def test_an_export_that_somebody_else_made_meanwhile_is_refused(base, tmp_path):
    """One that workers of this run have made, which died a moment later, is what was asked for."""
    import pretrained
    from shared.distributed import Worker

    (tmp_path / "out").mkdir()
    args = Options(export=str(tmp_path / "out"), base=str(base), merge=False, lora_rank=0)
    for note in (None, ("somewhere else", 0.0)):
        run = Options(local_mode=False, read_file=lambda name, note=note: note)
        with pytest.raises(UsageError, match="was made by somebody else meanwhile"):
            pretrained.export(None, args, run, Worker(), ends=[])
    pretrained.export(
        None, args, Options(local_mode=False, read_file=lambda name: (args.export, 0.0)), Worker(), ends=[]
    )
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_options_are_refused(base, rows, tmp_path):
    data = ["--base", base, "--data-file", rows[0]]
    (tmp_path / "there").mkdir()
    for options, because in [
        (["--export", tmp_path / "there"], "exists already; choose a new folder"),
        (["--merge", "--export", tmp_path / "new"], "--merge goes with --export and --lora-rank"),
        (["--merge", "--lora-rank", 2], "--merge goes with --export and --lora-rank"),
        (["--lora-alpha", 2], "--lora-alpha goes with --lora-rank"),
        (["--lora-dropout", 0.1], "--lora-dropout goes with --lora-rank"),
        (["--lora-rank", 2, "--lora-targets", "q_proj,w_proj"], "for an adapter is called w_proj; use some of down_p"),
        (["--lora-rank", 2, "--lora-targets", "lm_head"], "for an adapter is called lm_head"),  # it is the embedding
        (["--accumulate", 3], "--accumulate 3 does not divide the 32 rows of a rank"),
        (["--export", "/proc/new"], "cannot write"),
        (["--lr", "1e39"], "'1e39' is not a number above 0, between 1e-37 and 1e37"),
        (["--lr", "1e38"], "'1e38' is not a number above 0"),  # Adam overflows: it divides it by 0.1 at first
        (["--lr", "1e-50"], "'1e-50' is not a number above 0"),
        (["--dataset", "digits"], "invalid choice: 'digits'"),
        (["--model", "gpt"], "invalid choice: 'gpt'"),
        (["--precision", "fp16"], "invalid choice: 'fp16'"),
    ]:
        assert because in refused_here(FINETUNE, *data, *options)
    assert "--val-file goes with --data-file" in refused_here(FINETUNE, "--val-file", rows[1])
