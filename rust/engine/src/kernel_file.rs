//! Small files of the kernel, whose size is unknown before they are read.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// Most of these files fit into this: a buffer that grows from nothing needs ten reads.
const USUAL_BYTES: usize = 8192;

/// Reads a file of `/proc`, `/sys` or a cgroup. The kernel hands a list such as `mountinfo` over in pieces of a page.
pub(crate) fn read(path: impl AsRef<Path>) -> io::Result<Vec<u8>> {
    let mut content = Vec::with_capacity(USUAL_BYTES);
    File::open(path)?.read_to_end(&mut content)?;
    Ok(content)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_that_comes_in_pieces_is_read_to_its_end() {
        let text = read("/proc/self/smaps").unwrap();
        // The stack stands near the end of the list, which is longer than a page.
        assert!(memchr::memmem::find(&text, b"[stack]").is_some());
    }
}
