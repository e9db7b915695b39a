"""Run by the Python of a peer that is a library: one stream at a time, one thread, greedy.

    python one_stream.py llama.cpp | openvino-genai  WEIGHTS.gguf

Writes a line when it is ready, {}; then for each line {"prompt", "max_tokens"} that it reads one
{"prompt_tokens", "at"}: when each token came, in seconds since the line was read. Needs nothing of Headrace.
"""

import json
import os
import sys
import time
from collections.abc import Callable

CONTEXT = 4096
Answer = tuple[int, list[float]]
Generate = Callable[[str, int], Answer]


def llama_cpp(weights: str) -> Generate:
    """llama-cpp-python, with its defaults but for the context and the threads."""
    import llama_cpp

    model = llama_cpp.Llama(weights, n_ctx=CONTEXT, n_threads=1, n_threads_batch=1, verbose=False)

    def generate(prompt: str, count: int) -> Answer:
        at: list[float] = []
        began = time.perf_counter()
        tokens = model.tokenize(prompt.encode(), add_bos=False)
        model.reset()
        for _ in model.generate(tokens, temp=0.0):
            at.append(time.perf_counter() - began)
            if len(at) == count:
                break
        return len(tokens), at

    return generate


def openvino_genai(weights: str) -> Generate:
    """openvino-genai, which reads the file itself; one thread, all else as it comes."""
    import openvino_genai

    model = openvino_genai.LLMPipeline(weights, "CPU", INFERENCE_NUM_THREADS=1)

    class Stamps(openvino_genai.StreamerBase):  # type: ignore[misc]  # the library is not there for the type checker
        def __init__(self) -> None:
            super().__init__()
            self.began = time.perf_counter()
            self.at: list[float] = []

        def write(self, tokens: int | list[int]) -> object:
            now = time.perf_counter() - self.began
            self.at += [now] * (len(tokens) if isinstance(tokens, list) else 1)
            return openvino_genai.StreamingStatus.RUNNING

        def end(self) -> None:
            pass

    def generate(prompt: str, count: int) -> Answer:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = count
        config.ignore_eos = True
        config.do_sample = False
        config.apply_chat_template = False
        stamps = Stamps()
        told = model.generate([prompt], config, stamps)
        return int(told.perf_metrics.get_num_input_tokens()), stamps.at

    return generate


def main() -> None:
    """Until the end of its input."""
    kind, weights = sys.argv[1:3]
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)  # what libraries print is no answer
        generate = {"llama.cpp": llama_cpp, "openvino-genai": openvino_genai}[kind](weights)
        print("{}", file=out, flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            count, at = generate(asked["prompt"], asked["max_tokens"])
            print(json.dumps({"prompt_tokens": count, "at": at}), file=out, flush=True)


if __name__ == "__main__":
    main()
