"""Conversions between three forms of values: JSON, objects of the package `wasmtime`, and packed bytes (docs/spec/encoding.md)."""

import struct
from wasmtime import component as c


def shape(ty):
    """A type of a component as a nested tuple: a kind with its fields, element type or cases, or the name of a simple type."""
    match ty:
        case c.RecordType(): return ("record", [(name, shape(field)) for name, field in ty.fields])
        case c.ListType(): return ("list", shape(ty.element))
        case c.OptionType(): return ("option", shape(ty.payload))
        case c.EnumType(): return ("variant", [(name, None) for name in ty.names], "enum")
        case c.VariantType() | c.ResultType():
            return ("variant", [(name, case and shape(case)) for name, case in ty._cases()], ty._tagged())
    return (type(ty).__name__,)


def field_of(record, name):
    """A field of a JSON record; None if absent. Derives `truncated` of contract 0.1, and converts the object `columns` to a list."""
    if name == "truncated":
        return (record or {}).get("finish_reason") == "length"
    value = (record or {}).get(name.replace("-", "_"))
    return [{"name": key, "value": cell} for key, cell in value.items()] if name == "columns" and value else value


def case_of(cases, value):
    """Case, payload and payload type of a variant in JSON. Contract 0.1 has other cases in place of `none` and `other`."""
    types = dict(cases)
    if "number" in types:
        name = {bool: "flag", int: "number", float: "number", list: "items"}.get(type(value), "text")
    elif value is None:
        name = "not-sampled" if "not-sampled" in types else "hits"
    elif isinstance(value, dict):
        (name, value), = value.items()
        name = name.replace("_", "-")
    else:
        name = value.replace("_", "-")
        name = name if name in types and name != "other" else "other" if "other" in types else "unreachable"
    return name, value, types[name]


def lower(shape, value):
    """Converts a JSON value to the form of the package `wasmtime`."""
    match shape:
        case ("record", fields):
            record = c.Record()
            vars(record).update((name, lower(field, field_of(value, name))) for name, field in fields)
            return record
        case ("list", element): return [lower(element, entry) for entry in value or []]
        case ("option", some): return None if value is None else lower(some, value)
        case ("variant", cases, tagged):
            name, payload, some = case_of(cases, value)
            payload = lower(some, payload) if some else None
            return name if tagged == "enum" else c.Variant(name, payload) if tagged else payload
        case ("F32",) | ("F64",): return float(value)
        case ("String",): return value or ""
    return 0 if value is None else value


def lift(value):
    """Converts a value of the package `wasmtime` to JSON. `wasmtime` drops the case of a variant whose cases have different types."""
    match value:
        case c.Record(): return {name.replace("-", "_"): lift(field) for name, field in vars(value).items() if field is not None}
        case list(): return [lift(entry) for entry in value]
        case c.Variant("other"): return value.payload
        case c.Variant(name, None): return name.replace("-", "_")
        case c.Variant(name, payload): return {name.replace("-", "_"): lift(payload)}
    return value


def pack(shape, value):
    """Encodes a JSON value in the packed form."""
    match shape:
        case ("record", fields): return b"".join(pack(field, field_of(value, name)) for name, field in fields)
        case ("list", element): return struct.pack("<I", len(value or [])) + b"".join(pack(element, entry) for entry in value or [])
        case ("option", some): return b"\0" if value is None else b"\1" + pack(some, value)
        case ("variant", cases, _):
            name, payload, some = case_of(cases, value)
            return bytes([[case for case, _ in cases].index(name)]) + (pack(some, payload) if some else b"")
        case ("String",): return struct.pack("<I", len((value or "").encode())) + (value or "").encode()
    return struct.pack({"Bool": "<?", "U32": "<I", "U64": "<Q", "F64": "<d"}[shape[0]], 0 if value is None else value)


def unpack(shape, data):
    """Decodes a JSON value from the packed form. Raises `ValueError` or `struct.error` for invalid bytes."""
    value, end = unpack_at(shape, data, 0)
    if end != len(data):
        raise ValueError(f"byte {end}: expected the end")
    return value


def unpack_at(shape, data, at):
    match shape:
        case ("record", fields):
            record = {}
            for name, field in fields:
                record[name.replace("-", "_")], at = unpack_at(field, data, at)
            return record, at
        case ("list", element):
            (length,), at, entries = struct.unpack_from("<I", data, at), at + 4, []
            for _ in range(length):
                entry, at = unpack_at(element, data, at)
                entries.append(entry)
            return entries, at
        case ("variant", cases, _):
            (index,), at = struct.unpack_from("B", data, at), at + 1
            if index >= len(cases):
                raise ValueError(f"byte {at - 1} is {index}; expected a case")
            name, some = cases[index]
            payload, at = unpack_at(some, data, at) if some else (None, at)
            return {name: payload}, at
        case ("String",):
            (length,), at = struct.unpack_from("<I", data, at), at + 4
            if at + length > len(data):
                raise ValueError(f"byte {at}: expected a text of {length} bytes")
            return data[at:at + length].decode(), at + length
    return struct.unpack_from("<d", data, at)[0], at + 8
