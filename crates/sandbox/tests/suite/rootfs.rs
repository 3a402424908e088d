//! An image that needs no registry.

use std::{fs, process::Command};

/// Its users; the third line is none.
const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh\n\
    build:x:2001:2001:A builder:/home/build:/bin/sh\n\
    broken:x:many:2001::/:/bin/sh\n";
const GROUP: &str = "root:x:0:\nbuild:x:2001:\ntools:x:3001:other,build\n";

/// Whether it can be made here.
pub(crate) fn can_be_made() -> bool {
    Command::new("busybox").arg("true").output().is_ok()
}

/// A small root file system: a static busybox, and what every system has.
pub(crate) fn rootfs() -> Vec<u8> {
    let busybox = ["/bin/busybox", "/usr/bin/busybox"]
        .iter()
        .find_map(|path| fs::read(path).ok())
        .expect("busybox-static is installed (scripts/setup.sh test)");
    let applets = Command::new("busybox").arg("--list").output().unwrap();
    let mut builder = tar::Builder::new(Vec::new());
    let mut add = |path: &str, kind: tar::EntryType, mode: u32, content: &[u8], link: &str| {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_size(content.len() as u64);
        if link.is_empty() {
            builder.append_data(&mut header, path, content).unwrap();
        } else {
            builder.append_link(&mut header, path, link).unwrap();
        }
    };
    use tar::EntryType::{Directory, Regular, Symlink};
    for folder in [
        "bin/", "etc/", "usr/", "usr/bin/", "run/", "proc/", "dev/", "sys/", "var/", "home/",
    ] {
        add(folder, Directory, 0o755, b"", "");
    }
    for folder in ["tmp/", "var/tmp/", "run/lock/"] {
        add(folder, Directory, 0o1777, b"", "");
    }
    add("bin/busybox", Regular, 0o755, &busybox, "");
    for applet in String::from_utf8(applets.stdout).unwrap().lines() {
        if applet != "busybox" {
            add(&format!("bin/{applet}"), Symlink, 0o777, b"", "busybox");
        }
    }
    add("etc/passwd", Regular, 0o644, PASSWD.as_bytes(), "");
    add("etc/group", Regular, 0o644, GROUP.as_bytes(), "");
    add("etc/shadow", Regular, 0o600, b"for root only\n", "");
    // An image may come with a workspace.
    add("image/", Directory, 0o755, b"", "");
    add("image/folder/", Directory, 0o755, b"", "");
    add("image/folder/file", Regular, 0o640, b"from the image", "");
    builder.into_inner().unwrap()
}
