//! Where a cgroup hierarchy is mounted, and which directory in it is ours.
//!
//! Contract of the texts: [proc_pid_mountinfo(5)] and [cgroups(7)]. A process can be outside of what a mount
//! shows (another cgroup namespace, a bind mount of a part): then it has no directory there.
//!
//! [proc_pid_mountinfo(5)]: https://man7.org/linux/man-pages/man5/proc_pid_mountinfo.5.html
//! [cgroups(7)]: https://man7.org/linux/man-pages/man7/cgroups.7.html

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};

/// Which of a machine's cgroup trees is meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hierarchy<'name> {
    /// The one tree of cgroup v2.
    Unified,
    /// The v1 tree that has this controller.
    Controller(&'name str),
}

/// One mount of a hierarchy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// The cgroup that the mount point shows.
    pub root: PathBuf,
    /// Directory of the mount.
    pub point: PathBuf,
    /// Whether the mount itself is writable.
    pub writable: bool,
}

/// A cgroup as a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Top of the tree that is visible here.
    pub mount_point: PathBuf,
    /// The cgroup's directory, at or below the mount point.
    pub dir: PathBuf,
}

/// All mounts of a hierarchy named in the text of `/proc/self/mountinfo`, in its order. Skips lines of any other
/// form.
pub fn mounts(mountinfo: &[u8], hierarchy: Hierarchy<'_>) -> Vec<Mount> {
    mountinfo
        .split(|&byte| byte == b'\n')
        .filter_map(|line| mount(line, hierarchy))
        .collect()
}

fn mount(line: &[u8], hierarchy: Hierarchy<'_>) -> Option<Mount> {
    let mut fields = line.split(|&byte| byte == b' ');
    let root = fields.nth(3)?;
    let point = fields.next()?;
    let options = fields.next()?;
    // Any number of optional fields stands before the lone dash.
    fields.find(|&field| field == b"-")?;
    let kind = fields.next()?;
    let super_options = fields.nth(1)?;
    let wanted = match hierarchy {
        Hierarchy::Unified => kind == b"cgroup2",
        Hierarchy::Controller(name) => kind == b"cgroup" && has_item(super_options, name),
    };
    wanted.then(|| Mount {
        root: unescape(root),
        point: unescape(point),
        writable: has_item(options, "rw"),
    })
}

/// The caller's cgroup in a hierarchy, from the text of `/proc/self/cgroup`: relative to the root of its namespace.
pub fn own_path(cgroup: &[u8], hierarchy: Hierarchy<'_>) -> Option<PathBuf> {
    cgroup.split(|&byte| byte == b'\n').find_map(|line| {
        let mut fields = line.splitn(3, |&byte| byte == b':');
        let number = fields.next()?;
        let controllers = fields.next()?;
        let path = fields.next().filter(|path| path.starts_with(b"/"))?;
        let wanted = match hierarchy {
            Hierarchy::Unified => number == b"0" && controllers.is_empty(),
            Hierarchy::Controller(name) => has_item(controllers, name),
        };
        wanted.then(|| PathBuf::from(OsString::from_vec(path.to_vec())))
    })
}

/// The caller's own cgroup as a directory, or `None` when no mount of the hierarchy shows it.
///
/// A writable mount wins over others. Among equals the last one wins, because it may cover an earlier one.
pub fn own_place(mountinfo: &[u8], cgroup: &[u8], hierarchy: Hierarchy<'_>) -> Option<Place> {
    let path = own_path(cgroup, hierarchy)?;
    mounts(mountinfo, hierarchy)
        .into_iter()
        .filter_map(|mount| {
            let below = path.strip_prefix(&mount.root).ok()?;
            let inside = below
                .components()
                .all(|part| matches!(part, Component::Normal(_)));
            let dir = if below == Path::new("") {
                mount.point.clone()
            } else {
                mount.point.join(below)
            };
            inside.then_some((
                mount.writable,
                Place {
                    dir,
                    mount_point: mount.point,
                },
            ))
        })
        .max_by_key(|&(writable, _)| writable)
        .map(|(_, place)| place)
}

fn has_item(list: &[u8], name: &str) -> bool {
    list.split(|&byte| byte == b',')
        .any(|item| item == name.as_bytes())
}

/// Undoes the kernel's octal escapes of space, tab, newline and backslash.
fn unescape(field: &[u8]) -> PathBuf {
    let mut plain = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&byte, tail)) = rest.split_first() {
        let code = tail.get(..3).filter(|_| byte == b'\\').and_then(octal);
        plain.push(code.unwrap_or(byte));
        rest = if code.is_some() { &tail[3..] } else { tail };
    }
    PathBuf::from(OsString::from_vec(plain))
}

fn octal(digits: &[u8]) -> Option<u8> {
    digits.iter().try_fold(0_u8, |value, &digit| {
        let digit = digit.checked_sub(b'0').filter(|&digit| digit < 8)?;
        value.checked_mul(8)?.checked_add(digit)
    })
}

/// Puts a directory of the machine below another root; `/` leaves it as it is.
pub(crate) fn rooted(root: &Path, path: &Path) -> PathBuf {
    let bytes = path.as_os_str().as_bytes();
    let start = bytes.iter().take_while(|&&byte| byte == b'/').count();
    root.join(Path::new(std::ffi::OsStr::from_bytes(&bytes[start..])))
}

#[cfg(test)]
mod tests;
