//! The header of a vsock packet: 44 little-endian bytes (virtio 1.2, section 5.10.6).
//!
//! A header is parsed from an array that was copied out of guest memory once. Nothing looks at the
//! guest's copy again, so a guest that changes it afterwards changes nothing here.

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]

/// Size of a header on the wire, in bytes.
pub const HEADER_SIZE: usize = 44;

/// The only socket type that we speak: a stream.
pub const TYPE_STREAM: u16 = 1;

/// The sender of a SHUTDOWN will not receive any more.
pub const SHUTDOWN_RECEIVE: u32 = 1;
/// The sender of a SHUTDOWN will not send any more.
pub const SHUTDOWN_SEND: u32 = 2;
/// Both directions.
pub const SHUTDOWN_BOTH: u32 = SHUTDOWN_RECEIVE | SHUTDOWN_SEND;

/// What a packet is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Op {
    /// Asks for a connection.
    Request = 1,
    /// Accepts one.
    Response = 2,
    /// Refuses one, or ends it at once.
    Reset = 3,
    /// Ends one or both directions, as the flags say.
    Shutdown = 4,
    /// Carries payload.
    Data = 5,
    /// Tells nothing but the credit that every header carries.
    CreditUpdate = 6,
    /// Asks for a `CreditUpdate`.
    CreditRequest = 7,
}

impl Op {
    /// The operation with this number on the wire, if there is one.
    pub fn from_wire(raw: u16) -> Option<Self> {
        [
            Self::Request,
            Self::Response,
            Self::Reset,
            Self::Shutdown,
            Self::Data,
            Self::CreditUpdate,
            Self::CreditRequest,
        ]
        .into_iter()
        .find(|op| *op as u16 == raw)
    }
}

/// A packet header. The fields are as the sender wrote them; none is trusted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// Context id of the sender.
    pub src_cid: u64,
    /// Context id of the receiver.
    pub dst_cid: u64,
    /// Port of the sender.
    pub src_port: u32,
    /// Port of the receiver.
    pub dst_port: u32,
    /// Bytes of payload that follow the header.
    pub len: u32,
    /// Socket type; see [`TYPE_STREAM`].
    pub kind: u16,
    /// Operation; see [`Op`].
    pub op: u16,
    /// Flags of the operation.
    pub flags: u32,
    /// Size of the sender's receive buffer for this connection.
    pub buf_alloc: u32,
    /// Bytes that left that buffer since the connection began, modulo 2^32.
    pub fwd_cnt: u32,
}

impl Header {
    /// Reads a header from its bytes.
    pub fn from_bytes(bytes: &[u8; HEADER_SIZE]) -> Self {
        let mut rest = bytes.as_slice();
        Self {
            src_cid: u64::from_le_bytes(take(&mut rest)),
            dst_cid: u64::from_le_bytes(take(&mut rest)),
            src_port: u32::from_le_bytes(take(&mut rest)),
            dst_port: u32::from_le_bytes(take(&mut rest)),
            len: u32::from_le_bytes(take(&mut rest)),
            kind: u16::from_le_bytes(take(&mut rest)),
            op: u16::from_le_bytes(take(&mut rest)),
            flags: u32::from_le_bytes(take(&mut rest)),
            buf_alloc: u32::from_le_bytes(take(&mut rest)),
            fwd_cnt: u32::from_le_bytes(take(&mut rest)),
        }
    }

    /// Writes the header as bytes.
    pub fn to_bytes(&self) -> [u8; HEADER_SIZE] {
        let mut bytes = [0; HEADER_SIZE];
        let mut rest = bytes.as_mut_slice();
        put(&mut rest, self.src_cid.to_le_bytes());
        put(&mut rest, self.dst_cid.to_le_bytes());
        put(&mut rest, self.src_port.to_le_bytes());
        put(&mut rest, self.dst_port.to_le_bytes());
        put(&mut rest, self.len.to_le_bytes());
        put(&mut rest, self.kind.to_le_bytes());
        put(&mut rest, self.op.to_le_bytes());
        put(&mut rest, self.flags.to_le_bytes());
        put(&mut rest, self.buf_alloc.to_le_bytes());
        put(&mut rest, self.fwd_cnt.to_le_bytes());
        bytes
    }
}

/// Takes the first `N` bytes off `rest`. The fields sum up to [`HEADER_SIZE`], so there always are
/// as many; the tests hold that.
fn take<const N: usize>(rest: &mut &[u8]) -> [u8; N] {
    match rest.split_first_chunk() {
        Some((field, tail)) => {
            *rest = tail;
            *field
        }
        None => [0; N],
    }
}

/// Writes a field to the front of `rest` and steps over it.
fn put<const N: usize>(rest: &mut &mut [u8], field: [u8; N]) {
    if let Some((place, tail)) = std::mem::take(rest).split_first_chunk_mut() {
        *place = field;
        *rest = tail;
    }
}

#[cfg(test)]
#[allow(clippy::indexing_slicing, clippy::cast_possible_truncation)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_byte_survives_the_round_trip(bytes in any::<[u8; 22]>(), more in any::<[u8; 22]>()) {
            let mut wire = [0; HEADER_SIZE];
            wire[..22].copy_from_slice(&bytes);
            wire[22..].copy_from_slice(&more);
            prop_assert_eq!(Header::from_bytes(&wire).to_bytes(), wire);
        }
    }

    #[test]
    fn fields_lie_where_the_specification_puts_them() {
        let mut wire = [0; HEADER_SIZE];
        for (value, byte) in wire.iter_mut().enumerate() {
            *byte = value as u8;
        }
        let header = Header::from_bytes(&wire);
        assert_eq!(header.src_cid.to_le_bytes(), [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(header.dst_port.to_le_bytes(), [20, 21, 22, 23]);
        assert_eq!(header.len.to_le_bytes(), [24, 25, 26, 27]);
        assert_eq!(header.kind.to_le_bytes(), [28, 29]);
        assert_eq!(header.op.to_le_bytes(), [30, 31]);
        assert_eq!(header.flags.to_le_bytes(), [32, 33, 34, 35]);
        assert_eq!(header.buf_alloc.to_le_bytes(), [36, 37, 38, 39]);
        assert_eq!(header.fwd_cnt.to_le_bytes(), [40, 41, 42, 43]);
    }

    #[test]
    fn only_the_seven_operations_exist() {
        for raw in 0..=u16::MAX {
            let known = Op::from_wire(raw).map(|op| op as u16);
            assert_eq!(known, (1..=7).contains(&raw).then_some(raw));
        }
    }
}
