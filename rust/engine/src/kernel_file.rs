//! Small files of the kernel, whose size is unknown before they are read.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// Most of these files fit into this: one read suffices, but a buffer that grows from nothing needs ten.
const USUAL_BYTES: usize = 8192;

/// Reads a file of `/proc`, `/sys` or a cgroup.
pub(crate) fn read(path: impl AsRef<Path>) -> io::Result<Vec<u8>> {
    let mut file = File::open(path)?;
    let mut content = vec![0; USUAL_BYTES];
    let count = file.read(&mut content)?;
    content.truncate(count);
    if count == USUAL_BYTES {
        file.read_to_end(&mut content)?;
    }
    Ok(content)
}
