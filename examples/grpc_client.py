"""Ask a running cluster over gRPC. The stubs are in this repository; the service also answers reflection."""

import grpc

from cluster.stubs import inference_pb2 as pb
from cluster.stubs.inference_pb2_grpc import InferenceStub

with grpc.insecure_channel("127.0.0.1:8001") as channel:
    request = pb.GenerateRequest(
        chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="What is the capital of France?")]),
        temperature=0,
        max_tokens=64,
    )
    for event in InferenceStub(channel).Generate(request, timeout=60):
        if event.HasField("delta"):
            print(event.delta.text, end="", flush=True)
        elif event.HasField("summary"):
            s = event.summary
            print(f"\nprefill on {s.prefill_worker}, decode on {s.decode_worker}, {s.kv_bytes} bytes of KV moved")
