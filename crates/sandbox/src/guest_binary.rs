//! The guest inside this library, as a program that can be started.

use std::{
    fs::File,
    io::{self, Write},
    os::fd::AsRawFd,
    path::PathBuf,
    sync::LazyLock,
};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use sha2::{Digest, Sha256};

/// The program's bytes.
pub(crate) const BYTES: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/guest"));

/// SHA-256 over the guest and the release of the system whose folders sandboxes show, in
/// hexadecimal.
pub(crate) fn image_digest() -> &'static str {
    static DIGEST: LazyLock<String> = LazyLock::new(|| {
        let release = std::fs::read("/etc/os-release").unwrap_or_default();
        let mut hash = Sha256::new();
        for part in [BYTES, &release] {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        hash.finalize()
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect()
    });
    &DIGEST
}

/// A copy of the guest in memory; it can be started while this lives.
#[derive(Debug)]
pub(crate) struct GuestBinary {
    file: File,
}

impl GuestBinary {
    pub(crate) fn new() -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        // Kernels before 6.3 do not know the flag; later ones may insist on it.
        let file = memfd_create("espalier-guest", flags | MemfdFlags::EXEC)
            .or_else(|_| memfd_create("espalier-guest", flags))?;
        let mut file = File::from(file);
        file.write_all(BYTES)?;
        let _ = fcntl_add_seals(
            &file,
            SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL,
        );
        Ok(Self { file })
    }

    pub(crate) fn path(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.file.as_raw_fd()).into()
    }
}
