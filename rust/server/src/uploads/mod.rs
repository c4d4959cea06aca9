//! Uploads of weights: files that come in pieces, over any number of connections, before the engine reads them;
//! `rollspan.frontend.spool` is the twin.

mod byte_ranges;
mod claim;
mod spool;
mod upload;
mod writer;

pub(crate) use byte_ranges::{CONTENT_RANGE, parse_content_range};
pub(crate) use claim::Part;
pub(crate) use spool::{Reading, Spool};
pub(crate) use upload::check_file_name;
pub(crate) use writer::{Writer, wrong_length};
