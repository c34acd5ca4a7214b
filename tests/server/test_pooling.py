"""Embeddings, scores and reranking over FakeExecutor, whose vectors depend on every token of a prompt."""

from __future__ import annotations

import base64
import json
from dataclasses import replace

import anyio
import numpy as np
import openai
import pytest

from aserve.core.pooling import Abilities, PoolingKind, PoolingParams
from aserve.testing import fake_vector
from tests.server.test_sdk import _Hypercorn, _Uvicorn, running

pytestmark = pytest.mark.anyio

EMBEDDINGS, SCORE, RERANK = "/v1/embeddings", "/v1/score", "/v1/rerank"
JSON = {"content-type": "application/json"}
PLAIN = Abilities(size=8)
LAST = PoolingParams(kind=PoolingKind.LAST)


def vector_of(text, params=LAST):
    return fake_vector(list(text.encode()), params)


async def embed(client, inputs, **fields):
    return await client.post(EMBEDDINGS, {"model": "M", "input": inputs, **fields})


def vectors_in(answer):
    assert answer.status == 200, answer.body
    assert [entry["index"] for entry in answer.json["data"]] == list(range(len(answer.json["data"])))
    return np.array([entry["embedding"] for entry in answer.json["data"]], np.float32)


@pytest.mark.parametrize(
    ("inputs", "texts"),
    [
        ("abc", ["abc"]),
        (["abc", "x" * 200, "abc"], ["abc", "x" * 200, "abc"]),
        ([97, 98], ["ab"]),
        ([[97, 98], [99]], ["ab", "c"]),
    ],
    ids=["text", "texts", "ids", "lists"],
)
async def test_every_form_of_input(serving, inputs, texts):
    """Also longer than a step, in chunks."""
    async with serving() as client:
        answer = await embed(client, inputs)
        np.testing.assert_allclose(vectors_in(answer), [vector_of(text) for text in texts], rtol=1e-6)
        count = sum(map(len, texts))
        assert answer.json["usage"] == {"prompt_tokens": count, "total_tokens": count}
        assert answer.json["object"] == "list" and answer.json["data"][0]["object"] == "embedding"
        await client.settled()
        stats = client.app.slot.engine.stats()
        assert stats.num_requests["stop"] == len(texts) and stats.num_generated_tokens == 0


async def test_base64_are_the_same_numbers(serving):
    async with serving() as client:
        numbers = vectors_in(await embed(client, ["a", "b"]))
        packed = await embed(client, ["a", "b"], encoding_format="base64")
        raw = [base64.b64decode(entry["embedding"]) for entry in packed.json["data"]]
        np.testing.assert_array_equal(np.array([np.frombuffer(r, "<f4") for r in raw]), numbers)


async def test_normalisation_is_the_models_or_what_is_asked(serving):
    for own in (True, False):
        async with serving(abilities=replace(PLAIN, normalize=own)) as client:
            for asked in (None, True, False):
                length = np.linalg.norm(vectors_in(await embed(client, "abc", normalize=asked)))
                assert (abs(length - 1) < 1e-6) == (own if asked is None else asked)


async def test_a_mean_is_the_same_with_a_cached_prefix(serving):
    async with serving(abilities=replace(PLAIN, kind=PoolingKind.MEAN)) as client:
        for _ in range(2):
            vectors = vectors_in(await embed(client, "abcdefgh" * 12))
            np.testing.assert_allclose(vectors[0], vector_of("abcdefgh" * 12, replace(LAST, kind=PoolingKind.MEAN)))


@pytest.mark.parametrize(
    ("changes", "good", "bad"),
    [
        ({}, [8], [4, 9]),
        ({"matryoshka": True}, [1, 5, 8], [9]),
        ({"matryoshka": True, "matryoshka_sizes": (2, 4)}, [2, 4, 8], [3, 9]),
    ],
)
async def test_dimensions_are_those_that_the_model_is_made_for(serving, changes, good, bad):
    async with serving(abilities=replace(PLAIN, **changes)) as client:
        for dimensions in good:
            (vector,) = vectors_in(await embed(client, "abc", dimensions=dimensions))
            expected = vector_of("abc", replace(LAST, dimensions=dimensions))
            np.testing.assert_allclose(vector, expected, rtol=1e-6)
        for dimensions in bad:
            answer = await embed(client, "abc", dimensions=dimensions)
            assert (answer.status, answer.error["param"]) == (400, "dimensions")


async def test_prompts_of_the_model(serving):
    abilities = replace(PLAIN, prompts={"query": "Q: ", "document": "D: "}, default_prompt="document", lowercase=True)
    async with serving(abilities=abilities) as client:
        for name, text in (("query", "q: abc"), (None, "d: abc")):
            (vector,) = vectors_in(await embed(client, "ABC", prompt_name=name))
            np.testing.assert_allclose(vector, vector_of(text), rtol=1e-6)
        answer = await embed(client, "a", prompt_name="other")
        assert (answer.status, answer.error["param"]) == (400, "prompt_name")
        assert "query, document" in answer.error["message"]


@pytest.mark.parametrize("field", ["input_type", "additional_data", "encoding", "messages", "embed_dtype"])
async def test_an_unknown_field_is_refused_by_name(serving, field):
    async with serving() as client:
        for path, body in ((EMBEDDINGS, {"input": "a"}), (SCORE, {"text_1": "a", "text_2": "b"})):
            answer = await client.post(path, {"model": "M", **body, field: "x"})
            assert (answer.status, answer.error["param"]) == (400, field)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": [97, "a"]}, "input[1]"),
        ({"input": ["a", 97]}, "input[1]"),
        ({"input": [999]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": ["a"] * 200}, "input"),
        ({"input": "a" * 513}, "input"),
        ({"input": [97] * 513}, "input"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"model": "other"}, "model"),
    ],
)
async def test_what_cannot_be(serving, fields, param):
    async with serving(max_queue=100) as client:
        answer = await embed(
            client, **{"inputs": "a", **fields} if "input" not in fields else {"inputs": fields["input"]}
        )
        assert (answer.status, answer.error["param"]) == (404 if param == "model" else 400, param)


async def test_as_long_as_the_context_and_cut_to_it(serving):
    async with serving() as client:
        whole = vectors_in(await embed(client, "a" * 512))
        for limit in (-1, 512, 10**6):
            for value in ("a" * 700, [97] * 700):
                answer = await embed(client, value, truncate_prompt_tokens=limit)
                np.testing.assert_allclose(vectors_in(answer), whole, rtol=1e-6)
        (cut,) = vectors_in(await embed(client, "abcdef", truncate_prompt_tokens=3))
        np.testing.assert_allclose(cut, vector_of("abc"), rtol=1e-6)


async def test_wrong_doors_say_which_is_right(serving):
    async with serving(abilities=replace(PLAIN, tasks=("embed", "score"))) as client:
        for answer in (await client.chat(), await client.complete()):
            assert (answer.status, answer.error["code"]) == (400, "task_not_offered")
            assert "/v1/embeddings" in answer.error["message"]
        assert (await client.get("/v1/models")).json["data"][0]["tasks"] == ["embed", "score"]
    async with serving(abilities=replace(PLAIN, tasks=("generate",))) as client:
        for path, body in (
            (EMBEDDINGS, {"input": "a"}),
            (SCORE, {"text_1": "a", "text_2": "b"}),
            (RERANK, {"query": "a", "documents": ["b"]}),
        ):
            answer = await client.post(path, {"model": "M", **body})
            assert (answer.status, answer.error["code"]) == (400, "task_not_offered")
            assert "/v1/chat/completions" in answer.error["message"]


async def test_scores_are_cosines(serving):
    async with serving(abilities=replace(PLAIN, normalize=False)) as client:
        for first, second in (("a", ["b", "a", "c"]), (["a", "b"], ["b", "b"]), ("x", "y")):
            answer = await client.post(SCORE, {"model": "M", "text_1": first, "text_2": second})
            assert answer.status == 200, answer.body
            others = [second] if isinstance(second, str) else second
            ones = [first] * len(others) if isinstance(first, str) else first
            expected = [float(vector_of(a) @ vector_of(b)) for a, b in zip(ones, others, strict=True)]
            assert [entry["score"] for entry in answer.json["data"]] == pytest.approx(expected, abs=1e-6)
        answer = await client.post(SCORE, {"model": "M", "text_1": ["a", "b"], "text_2": ["a", "b", "c"]})
        assert (answer.status, answer.error["param"]) == (400, "text_1")


async def test_reranking_sorts_by_relevance(serving):
    documents = ["one", {"text": "two"}, "three", "two"]
    texts = ["one", "two", "three", "two"]
    abilities = replace(PLAIN, prompts={"query": "Q", "document": "D"})
    async with serving(abilities=abilities) as client:
        body = {"model": "M", "query": "which", "documents": documents}
        answer = await client.post(RERANK, body)
        scores = [float(vector_of("Qwhich") @ vector_of("D" + text)) for text in texts]
        results = answer.json["results"]
        assert [entry["index"] for entry in results] == sorted(range(4), key=lambda i: -scores[i])
        for entry in results:
            assert entry["relevance_score"] == pytest.approx(scores[entry["index"]], abs=1e-6)
            assert entry["document"] == {"text": texts[entry["index"]]}
        best = (await client.post(RERANK, {**body, "top_n": 1, "return_documents": False})).json["results"]
        assert best == [{k: v for k, v in results[0].items() if k != "document"}]
        answer = await client.post(RERANK, {**body, "documents": ["a", {"image": "x"}]})
        assert (answer.status, answer.error["param"]) == (400, "documents[1]")


async def test_one_admission_for_all_inputs(serving, gate):
    """What does not fit the queue is refused as a whole, and nothing of it runs."""
    async with serving(max_queue=2, max_num_seqs=1, gate=gate) as client, anyio.create_task_group() as tasks:
        tasks.start_soon(embed, client, "first")
        await client.submitted(1)
        answer = await embed(client, ["a", "b", "c"])
        assert (answer.status, answer.error["code"]) == (503, "queue_full")
        assert client.app.slot.engine._router.num_unfinished == 1
        gate.open()


@pytest.mark.parametrize("moment", ["at_once", "waiting", "running"])
async def test_a_client_that_leaves_takes_its_inputs_along(serving, make_exchange, gate, moment):
    body = json.dumps({"model": "M", "input": ["x" * 300, "y" * 300, "z"]}).encode()
    async with serving(gate=gate, max_num_seqs=1) as client, anyio.create_task_group() as tasks:
        if moment == "waiting":
            tasks.start_soon(embed, client, "blocker")
            await client.submitted(1)
        exchange = make_exchange(body)
        if moment == "at_once":
            exchange.disconnect()
        tasks.start_soon(client.run, exchange, "POST", EMBEDDINGS, JSON)
        if moment != "at_once":
            await client.submitted(4 if moment == "waiting" else 3)
            if moment == "running":
                gate.release()  # one chunk of the first
                await client.until(lambda: client.app.slot.engine.stats().num_steps >= 1)
            exchange.disconnect()
            await client.until(lambda: client.app.slot.engine._router.num_unfinished <= (moment == "waiting"))
        gate.open()
        await client.settled()
    stats = client.app.slot.engine.stats()
    assert stats.num_used_blocks == 0
    assert stats.num_requests["cancelled"] in ((0, 3) if moment == "at_once" else (3,))


async def test_the_time_limit(serving, gate):
    async with serving(gate=gate) as client:
        answer = await client.post(EMBEDDINGS, {"model": "M", "input": ["a", "b"]}, {"x-request-timeout": "0.05"})
        assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
        gate.open()
        await client.settled()


@pytest.mark.parametrize("kind", [_Uvicorn, _Hypercorn])
def test_the_official_client(serving, kind):
    """It asks for base64 unless told otherwise, and checks what it gets."""
    with running(kind, serving) as url, openai.OpenAI(base_url=url, api_key="x", timeout=20, max_retries=0) as sdk:
        packed = sdk.embeddings.create(model="M", input=["abc", "de"])
        plain = sdk.embeddings.create(model="M", input=["abc", "de"], encoding_format="float", user="u")
        for answer in (packed, plain):
            assert [type(answer.model_validate(answer.model_dump())), answer.model] == [type(packed), "M"]
            vectors = np.array([entry.embedding for entry in answer.data], np.float32)
            np.testing.assert_allclose(vectors, [vector_of("abc"), vector_of("de")], rtol=1e-6)
            assert answer.usage.prompt_tokens == answer.usage.total_tokens == 5
        with pytest.raises(openai.BadRequestError, match="dimensions"):
            sdk.embeddings.create(model="M", input="abc", dimensions=3)
