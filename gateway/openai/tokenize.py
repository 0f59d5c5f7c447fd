"""`/tokenize` and `/detokenize`, in vLLM's shapes. Knows no socket; routes.py calls."""

from collections.abc import Mapping
from typing import Any

from headrace.gateway.errors import bad_request
from headrace.gateway.fields import Fields, is_token_ids
from headrace.gateway.jobs import Jobs
from headrace.gateway.openai.chat import parse_chat
from headrace.gateway.schemas import Prompt, TextPrompt

MAX_CHARACTERS = 1 << 30  # the body limit is stricter


async def tokenize(body: Mapping[str, Any], jobs: Jobs) -> dict[str, Any]:
    """`prompt` (a string) or `messages` to token ids.

    Raises:
        ApiError: 400, 404, 429, 503.
    """
    fields = Fields(body)
    jobs.check_model(fields.string("model", 256) or "")
    prompt: Prompt
    if fields.get("messages") is not None:
        prompt = parse_chat(body).prompts[0]
    else:
        text = fields.string("prompt", MAX_CHARACTERS)
        if text is None:
            raise bad_request("either prompt or messages is needed", "prompt")
        prompt = TextPrompt(text=text, add_special_tokens=fields.boolean("add_special_tokens", True))
    token_ids = await jobs.text.encode(prompt)
    answer = {"count": len(token_ids), "max_model_len": jobs.max_model_len, "tokens": token_ids}
    if fields.boolean("return_token_strs"):
        answer["token_strs"] = [jobs.text.vocabulary.token_text(token_id) for token_id in token_ids]
    return answer


def detokenize(body: Mapping[str, Any], jobs: Jobs) -> dict[str, Any]:
    """`tokens` to text, special tokens by their names.

    Raises:
        ApiError: 400, 404.
    """
    fields = Fields(body)
    jobs.check_model(fields.string("model", 256) or "")
    token_ids = fields.array("tokens", 1 << 24)
    if token_ids is None or not is_token_ids(token_ids):
        raise bad_request("tokens must be an array of token ids", "tokens")
    size = len(jobs.text.vocabulary)
    if max(token_ids, default=0) >= size:
        raise bad_request(f"tokens contains the id {max(token_ids)}, the tokenizer has {size}", "tokens")
    return {"prompt": jobs.text.decode(token_ids, skip_special_tokens=False)}
