"""The messages of Chakra's schema that our files have, for Google's protobuf: built at run time from their fields."""

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

TYPES = {"uint64": 4, "int64": 3, "int32": 5, "bool": 8, "string": 9, "message": 11, "double": 1}

# Message -> field: (number, type, repeated).
MESSAGES = {
    "BoolList": {"values": (1, "bool", True)},
    "AttributeProto": {
        "name": (1, "string", False),
        "int32_val": (7, "int32", False),
        "int64_val": (9, "int64", False),
        "bool_val": (27, "bool", False),
        "bool_list": (28, "BoolList", False),
        "string_val": (29, "string", False),
    },
    "GlobalMetadata": {"version": (1, "string", False), "attr": (2, "AttributeProto", True)},
    "Node": {
        "id": (1, "uint64", False),
        "name": (2, "string", False),
        "type": (3, "int32", False),
        "ctrl_deps": (4, "uint64", True),
        "data_deps": (5, "uint64", True),
        "start_time_micros": (6, "uint64", False),
        "duration_micros": (7, "uint64", False),
        "attr": (10, "AttributeProto", True),
    },
}


def _classes():
    file = descriptor_pb2.FileDescriptorProto(name="et.proto", package="chakra", syntax="proto3")
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        if name == "AttributeProto":
            message.oneof_decl.add(name="value")
        for field, (number, kind, repeated) in fields.items():
            added = message.field.add(name=field, number=number, label=3 if repeated else 1)
            added.type = TYPES.get(kind, TYPES["message"])
            if kind not in TYPES:
                added.type_name = f".chakra.{kind}"
            if field.endswith(("_val", "_list")):
                added.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"chakra.{name}")) for name in MESSAGES}


_made = _classes()
GlobalMetadata, Node = _made["GlobalMetadata"], _made["Node"]
