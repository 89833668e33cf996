//! What others see of this process: its command line and its environment.

use core::ffi::c_char;
use core::ptr::null_mut;
use std::ffi::CString;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

use super::ForkedChild;

/// The libc crate has neither.
const PR_SET_MM: i32 = 35;
const PR_SET_MM_MAP: i32 = 14;

/// Zeroes before the texts. `setproctitle` looks for the command before the environment, up to 8 KiB of it, and
/// finds its end here.
const MARGIN: usize = 16 << 10;

/// The kernel's `struct prctl_mm_map`.
#[repr(C)]
struct MemoryMap {
    start_code: u64,
    end_code: u64,
    start_data: u64,
    end_data: u64,
    start_brk: u64,
    brk: u64,
    start_stack: u64,
    arg_start: u64,
    arg_end: u64,
    env_start: u64,
    env_end: u64,
    auxv: *mut u64,
    auxv_size: u32,
    exe_fd: u32,
}

/// Shows `argv` as this process's command in `ps` and `/proc`, and makes `environ` its environment. If the kernel
/// refuses, as much of the command as fits overwrites the old one, and `/proc` shows the old environment.
///
/// `words`: the number of words this process was started with. Its program may still rely on that number, and finds
/// as many words before the environment; the missing ones are empty.
///
/// [PR_SET_MM(2const)](https://man7.org/linux/man-pages/man2/PR_SET_MM.2const.html)
pub(crate) fn show(_child: ForkedChild, argv: &[CString], environ: &[CString], words: usize) {
    let gap = words.saturating_sub(argv.len());
    let Some(texts) = lay_out(argv, gap, environ) else {
        return;
    };
    // SAFETY: a forked child has no other thread that could read it. The array is never freed and ends in a null
    // pointer.
    unsafe { super::environ = texts.pointers[argv.len()..].as_ptr() };
    let Some(stat) = own_stat() else { return };
    // Fields by their number in proc_pid_stat(5).
    let field = |number: usize| stat.get(number - 3).copied().unwrap_or(0);
    let map = MemoryMap {
        start_code: field(26),
        end_code: field(27),
        start_data: field(45),
        end_data: field(46),
        start_brk: field(47),
        // SAFETY: asks for the end of the heap.
        brk: unsafe { libc::syscall(libc::SYS_brk, 0) } as u64,
        start_stack: field(28),
        arg_start: texts.start,
        arg_end: texts.start + length(argv),
        env_start: texts.start + length(argv) + gap as u64,
        env_end: texts.start + length(argv) + gap as u64 + length(environ),
        auxv: null_mut(),
        auxv_size: 0,
        exe_fd: u32::MAX,
    };
    // SAFETY: the map is the kernel's struct, and the kernel checks what is in it.
    let result = unsafe {
        libc::prctl(
            PR_SET_MM,
            PR_SET_MM_MAP,
            &raw const map,
            size_of::<MemoryMap>(),
            0,
        )
    };
    if result != 0 {
        // SAFETY: the kernel has just told the range, and a forked child has no other thread that could read it.
        unsafe { overwrite(field(48), field(49), argv) };
    }
}

/// Texts one after another, in memory that is never freed.
struct Texts {
    start: u64,
    /// One pointer per text, then a null pointer.
    pointers: &'static [*const c_char],
}

fn length(texts: &[CString]) -> u64 {
    texts
        .iter()
        .map(|text| text.as_bytes_with_nul().len() as u64)
        .sum()
}

fn lay_out(argv: &[CString], gap: usize, environ: &[CString]) -> Option<Texts> {
    let length = MARGIN + gap + (length(argv) + length(environ)) as usize;
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a fresh anonymous mapping at an address of the kernel's choice touches nothing of ours.
    let base = unsafe { mmap_anonymous(null_mut(), length, access, MapFlags::PRIVATE) }.ok()?;
    let start = base.cast::<c_char>().wrapping_add(MARGIN);
    let mut place = start;
    let mut pointers = Vec::new();
    for (index, text) in argv.iter().chain(environ).enumerate() {
        if index == argv.len() {
            place = place.wrapping_add(gap);
        }
        let bytes = text.as_bytes_with_nul();
        pointers.push(place.cast_const());
        // SAFETY: the mapping is as long as all texts, and new.
        unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr().cast(), place, bytes.len()) };
        place = place.wrapping_add(bytes.len());
    }
    pointers.push(core::ptr::null());
    Some(Texts {
        start: start as u64,
        pointers: pointers.leak(),
    })
}

/// The fields of `/proc/self/stat` from the third on, as numbers. The third, a letter, becomes 0.
fn own_stat() -> Option<Vec<u64>> {
    let text = crate::kernel_file::read("/proc/self/stat").ok()?;
    let end = text.iter().rposition(|&byte| byte == b')')?;
    let text = String::from_utf8_lossy(&text[end + 1..]);
    Some(
        text.split_whitespace()
            .map(|word| word.parse().unwrap_or(0))
            .collect(),
    )
}

/// Overwrites the command that this process was started with.
///
/// # Safety
/// The range is that of the process's arguments, and no thread reads it meanwhile.
unsafe fn overwrite(start: u64, end: u64, argv: &[CString]) {
    let length = end.saturating_sub(start) as usize;
    if start == 0 || length == 0 {
        return;
    }
    let mut bytes: Vec<u8> = argv
        .iter()
        .flat_map(CString::as_bytes_with_nul)
        .copied()
        .collect();
    bytes.resize(length, 0);
    // If the last byte is not zero, the kernel shows the command and goes on into the environment.
    bytes[length - 1] = 0;
    // SAFETY: the kernel says that the arguments lie there, in memory that is the process's own.
    unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), start as *mut u8, length) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_written_as_far_as_it_fits_and_ends_within_its_place() {
        for (room, expected) in [
            (&b"old command\0"[..], &b"new\0word\0\0\0\0"[..]),
            (b"old name\0", b"new\0word\0"),
            (b"short\0", b"new\0w\0"),
            (b"\0", b"\0"),
            (b"", b""),
        ] {
            let mut memory = room.to_vec();
            let start = memory.as_mut_ptr() as u64;
            let end = start + memory.len() as u64;
            // SAFETY: the range is that of the vector.
            unsafe { overwrite(start, end, &[c"new".into(), c"word".into()]) };
            assert_eq!(memory, expected);
        }
    }
}
