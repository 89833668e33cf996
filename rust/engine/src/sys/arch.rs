//! Raw system calls and the `clone3` trampoline, per architecture.
//!
//! A child that shares its parent's memory must not run anything that touches the parent's thread-local
//! storage, and libc's wrappers write `errno` there. These functions return the kernel's value as it is:
//! negative numbers are `-errno`.

use core::ffi::c_void;

/// Program of a cloned child: runs on its own stack and returns the exit code of the process.
pub(super) type ChildMain = unsafe extern "C" fn(*mut c_void) -> i32;

#[cfg(target_arch = "x86_64")]
core::arch::global_asm!(
    ".global dsl_clone3",
    ".hidden dsl_clone3",
    ".type dsl_clone3, @function",
    "dsl_clone3:",
    "mov r8, rcx", // the kernel clobbers rcx and r11
    "mov eax, 435",
    "syscall",
    "test rax, rax",
    "jz 2f",
    "ret",
    "2:",
    "xor ebp, ebp",
    "mov rdi, r8",
    "call rdx",
    "mov edi, eax",
    "mov eax, 60",
    "syscall",
    "ud2",
    ".size dsl_clone3, . - dsl_clone3",
);

#[cfg(target_arch = "aarch64")]
core::arch::global_asm!(
    ".global dsl_clone3",
    ".hidden dsl_clone3",
    ".type dsl_clone3, %function",
    "dsl_clone3:",
    "mov x8, #435",
    "svc #0",
    "cbz x0, 2f",
    "ret",
    "2:",
    "mov x29, #0",
    "mov x30, #0",
    "mov x0, x3",
    "blr x2",
    "mov x8, #93",
    "svc #0",
    "brk #0",
    ".size dsl_clone3, . - dsl_clone3",
);

unsafe extern "C" {
    /// Calls `clone3(args, size)`; in the child, calls `main(arg)` on the stack named in `args` and exits with
    /// its result. Returns the child's pid or `-errno` in the parent.
    pub(super) fn dsl_clone3(args: *mut c_void, size: usize, main: ChildMain, arg: *mut c_void) -> isize;
}

/// A system call with up to six arguments.
///
/// # Safety
/// The arguments must be what the call numbered `number` asks for.
#[cfg(target_arch = "x86_64")]
#[expect(
    clippy::inline_always,
    reason = "six arguments through memory would cost more than the call"
)]
#[inline(always)]
pub(super) unsafe fn syscall(number: libc::c_long, args: [usize; 6]) -> isize {
    let [a0, a1, a2, a3, a4, a5] = args;
    let result: isize;
    // SAFETY: the kernel preserves every register but rax, rcx and r11, all declared here.
    unsafe {
        core::arch::asm!(
            "syscall",
            inlateout("rax") number as isize => result,
            in("rdi") a0, in("rsi") a1, in("rdx") a2, in("r10") a3, in("r8") a4, in("r9") a5,
            lateout("rcx") _, lateout("r11") _,
            options(nostack),
        );
    }
    result
}

/// A system call with up to six arguments.
///
/// # Safety
/// The arguments must be what the call numbered `number` asks for.
#[cfg(target_arch = "aarch64")]
#[expect(
    clippy::inline_always,
    reason = "six arguments through memory would cost more than the call"
)]
#[inline(always)]
pub(super) unsafe fn syscall(number: libc::c_long, args: [usize; 6]) -> isize {
    let [a0, a1, a2, a3, a4, a5] = args;
    let result: isize;
    // SAFETY: the kernel preserves every register but x0, declared here.
    unsafe {
        core::arch::asm!(
            "svc #0",
            in("x8") number,
            inlateout("x0") a0 as isize => result,
            in("x1") a1, in("x2") a2, in("x3") a3, in("x4") a4, in("x5") a5,
            options(nostack),
        );
    }
    result
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("dsl supports Linux on x86-64 and aarch64");
