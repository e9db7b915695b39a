"""What grpcurl does - list, describe, call by descriptor - with nothing but the address of a router's gRPC door."""

import asyncio
from typing import Any

import grpc
from google.protobuf import json_format, message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from cluster.rpc import PublicDoor, make_server, service
from cluster.stubs import inference_pb2, inference_pb2_grpc
from router.front.grpc_service import InferenceService
from tests.fakes.dispatcher import FakeDispatcher, say
from tests.integration.front_door_server import MODEL, make_front

SERVICE = "headrace.v1.Inference"


class Stranger:
    """A client that has no stubs."""

    def __init__(self, address: str) -> None:
        self._address = address

    def services(self) -> set[str]:
        with grpc.insecure_channel(self._address) as channel:
            return set(ProtoReflectionDescriptorDatabase(channel).get_services())

    def fields(self, method: str) -> set[str]:
        with grpc.insecure_channel(self._address) as channel:
            pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
            return set(pool.FindServiceByName(SERVICE).FindMethodByName(method).input_type.fields_by_name)

    def call(self, method: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Answers as JSON."""
        with grpc.insecure_channel(self._address) as channel:
            pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
            found = pool.FindServiceByName(SERVICE).FindMethodByName(method)
            question = message_factory.GetMessageClass(found.input_type)
            answer = message_factory.GetMessageClass(found.output_type)
            call = channel.unary_stream(f"/{SERVICE}/{method}", question.SerializeToString, answer.FromString)
            messages = call(json_format.ParseDict(body, question()), timeout=10)
            return [json_format.MessageToDict(message) for message in messages]


async def test_list_describe_and_call_by_descriptor() -> None:
    front = make_front(FakeDispatcher(say("Paris 🗼")))
    inference = service(
        inference_pb2.DESCRIPTOR,
        "Inference",
        inference_pb2_grpc.add_InferenceServicer_to_server,
        InferenceService(front),
    )
    server = make_server("127.0.0.1", 0, [inference], PublicDoor())
    await server.start()
    try:
        stranger = Stranger(server.address)
        listed = await asyncio.to_thread(stranger.services)
        fields = await asyncio.to_thread(stranger.fields, "Generate")
        models = await asyncio.to_thread(stranger.call, "ListModels", {})
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        said = await asyncio.to_thread(stranger.call, "Generate", {"chat": chat, "maxTokens": 64, "seed": "7"})
    finally:
        await server.stop(10)
    assert listed == {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    assert {"prompt", "token_ids", "chat", "max_tokens", "request_id"} <= fields
    assert models == [{"models": [{"id": MODEL, "maxContext": 512}]}]
    assert "".join(message["delta"].get("text", "") for message in said if "delta" in message) == "Paris 🗼"
    assert said[-1]["summary"]["completionTokens"] == len("Paris 🗼".encode()) + 1
