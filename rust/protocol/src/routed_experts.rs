//! Which experts of a mixture-of-experts model tokens were routed to.

use serde::de::SeqAccess;

use crate::array::{Array, Dtype, invalid, write_array};
use crate::source::Source;
use crate::wire::Wire;
use crate::writer::Writer;

/// Expert ids `[tokens, layers, top_k]`, in the smallest of three types that holds them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoutedExperts {
    dtype: Dtype,
    shape: [usize; 3],
    data: Vec<u8>,
}

impl RoutedExperts {
    /// Ids of an item type by its name, little-endian; `None` where they don't fill the shape.
    pub fn new(dtype: &str, shape: [usize; 3], data: Vec<u8>) -> Option<Self> {
        let dtype = Self::DTYPES.into_iter().find(|known| known.numpy() == dtype)?;
        let bytes = shape.iter().try_fold(dtype.bytes(), |bytes, size| bytes.checked_mul(*size))?;
        (bytes == data.len()).then_some(Self { dtype, shape, data })
    }

    const DTYPES: [Dtype; 3] = [Dtype::Uint8, Dtype::Int16, Dtype::Int32];

    /// numpy's name of the item type: `|u1`, `<i2` or `<i4`.
    pub const fn dtype(&self) -> &'static str {
        self.dtype.numpy()
    }

    /// Tokens, layers, experts of each.
    pub const fn shape(&self) -> [usize; 3] {
        self.shape
    }

    /// The ids, little-endian, the last dimension innermost.
    pub fn data(&self) -> &[u8] {
        &self.data
    }

    pub(crate) fn write(&self, writer: &mut Writer) {
        write_array(writer, self.dtype(), &self.shape, &self.data);
    }
}

impl Wire for RoutedExperts {
    const EXPECTED: &'static str = "an array";

    fn array<'de, A: SeqAccess<'de>>(access: A, source: &Source<'_>) -> Result<Self, A::Error> {
        let array = Array::array(access, source)?;
        let &[tokens, layers, top_k] = array.shape.sizes() else {
            return Err(source.refuse(invalid("must have the shape [tokens, layers, top_k]")));
        };
        if !Self::DTYPES.contains(&array.dtype) {
            return Err(source.refuse(invalid("dtype must be |u1, <i2 or <i4")));
        }
        let data = array.bytes(source).map_err(|kind| source.refuse_at("data", kind))?.to_vec();
        Ok(Self { dtype: array.dtype, shape: [tokens, layers, top_k], data })
    }
}
