//! The fields of a protobuf message as they lie there, for what is not decoded: the answers of both APIs, whose fields have the
//! same numbers.

use prost::DecodeError;
use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};

/// Field of both responses that holds the extents.
pub const BLOCK_METADATA: u32 = 3;

/// What a field holds.
#[derive(Debug)]
pub enum Value<'m> {
    Number(u64),
    Bytes(&'m [u8]),
    /// What neither API has: numbers of fixed length, groups.
    Other,
}

/// The next field of a message: its number and value. Nothing at the end.
pub fn next_field<'m>(rest: &mut &'m [u8]) -> Result<Option<(u32, Value<'m>)>, DecodeError> {
    if rest.is_empty() {
        return Ok(None);
    }
    let (field, wire_type) = decode_key(rest)?;
    let whole = *rest;
    let value = match wire_type {
        WireType::Varint => Value::Number(decode_varint(rest)?),
        WireType::LengthDelimited => {
            skip_field(wire_type, field, rest, DecodeContext::default())?;
            let mut bytes = &whole[..whole.len() - rest.len()];
            decode_varint(&mut bytes)?;
            Value::Bytes(bytes)
        }
        _ => {
            skip_field(wire_type, field, rest, DecodeContext::default())?;
            Value::Other
        }
    };
    Ok(Some((field, value)))
}
