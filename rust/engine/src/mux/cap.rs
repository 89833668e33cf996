//! A log file with a size limit. It keeps the first half of the output, and two segments take turns to keep the end.
//!
//! A segment is a file beside the log, which we make under a unique name. It has a name so that the user finds the
//! end of the output even if we are killed.

use std::ffi::{CStr, CString};
use std::os::fd::OwnedFd;

use rustix::fs::{Mode, OFlags, ftruncate, unlink};
use rustix::io::{Errno, pread, pwrite, retry_on_intr};

use crate::mux::whole::write_all;
use crate::token;

/// Bytes of one copy step.
const COPY_BYTES: usize = 64 * 1024;

pub(super) struct Cap {
    max: u64,
    head_left: u64,
    segments: [Option<Segment>; 2],
    /// Which of the two segments is being written.
    current: usize,
    /// Number of bytes written to segments so far.
    total: u64,
}

struct Segment {
    file: OwnedFd,
    path: CString,
    used: u64,
}

impl Cap {
    pub(super) fn new(max: u64) -> Self {
        Self {
            max,
            head_left: max / 2,
            segments: [None, None],
            current: 1,
            total: 0,
        }
    }

    /// Writes to the file while its first half has room, then to the segments. An error comes with the number of
    /// bytes that were not written.
    pub(super) fn write(&mut self, head: &OwnedFd, path: &CStr, data: &[u8]) -> Result<(), (Errno, usize)> {
        let first = data
            .len()
            .min(usize::try_from(self.head_left).unwrap_or(usize::MAX));
        let (begin, mut rest) = data.split_at(first);
        self.head_left -= first as u64;
        write_all(head, begin).map_err(|(errno, left)| (errno, left + rest.len()))?;
        let limit = (self.max / 4).max(1);
        while !rest.is_empty() {
            let segment = self.segment(path, limit).map_err(|errno| (errno, rest.len()))?;
            let count = rest.len().min((limit - segment.used) as usize);
            let written = retry_on_intr(|| pwrite(&segment.file, &rest[..count], segment.used));
            let written = match written {
                Ok(0) => Err(Errno::IO),
                other => other,
            };
            let written = written.map_err(|errno| (errno, rest.len()))?;
            segment.used += written as u64;
            self.total += written as u64;
            rest = &rest[written..];
        }
        Ok(())
    }

    /// A segment with room. When one is full, the older one is emptied and used.
    fn segment(&mut self, path: &CStr, limit: u64) -> Result<&mut Segment, Errno> {
        let is_full =
            |segment: &Option<Segment>| segment.as_ref().is_none_or(|segment| segment.used >= limit);
        if is_full(&self.segments[self.current]) {
            let next = 1 - self.current;
            match &mut self.segments[next] {
                Some(segment) => {
                    ftruncate(&segment.file, 0)?;
                    segment.used = 0;
                }
                none => *none = Some(Segment::create(path)?),
            }
            self.current = next;
        }
        self.segments[self.current].as_mut().ok_or(Errno::IO)
    }

    /// Appends the end to the beginning, with a note about the bytes left out between them. Later output begins a new
    /// first half. After a failure the segments stay where they are.
    pub(super) fn finish(&mut self, head: &OwnedFd) -> Result<(), Errno> {
        let done = std::mem::replace(self, Self::new(self.max));
        let [first, second] = done.segments;
        let in_order = if done.current == 0 {
            [second, first]
        } else {
            [first, second]
        };
        let kept: u64 = in_order.iter().flatten().map(|segment| segment.used).sum();
        let left_out = done.total.saturating_sub(kept);
        if left_out > 0 {
            let note = format!("\n[dsl: {left_out} bytes left out]\n");
            write_all(head, note.as_bytes()).map_err(|(errno, _)| errno)?;
        }
        for segment in in_order.into_iter().flatten() {
            segment.append_to(head)?;
        }
        Ok(())
    }
}

impl Segment {
    fn create(path: &CStr) -> Result<Self, Errno> {
        let name = [path.to_bytes(), b".part-", token::random().as_bytes()].concat();
        let path = CString::new(name).map_err(|_| Errno::INVAL)?;
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let file = rustix::fs::open(&path, flags, Mode::from_raw_mode(0o640))?;
        Ok(Self { file, path, used: 0 })
    }

    fn append_to(&self, head: &OwnedFd) -> Result<(), Errno> {
        let mut buffer = vec![0; COPY_BYTES];
        let mut at = 0;
        while at < self.used {
            let count = retry_on_intr(|| pread(&self.file, &mut buffer[..], at))?;
            if count == 0 {
                return Err(Errno::IO);
            }
            write_all(head, &buffer[..count]).map_err(|(errno, _)| errno)?;
            at += count as u64;
        }
        // The file now has all bytes of the segment.
        let _ = unlink(&self.path);
        Ok(())
    }
}
