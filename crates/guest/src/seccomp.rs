//! System calls that nobody in a sandbox needs and that kernels had their worst bugs in. They
//! answer ENOSYS, as on a kernel without them, so programs take their other way (Node.js without
//! io_uring, for one). What nested sandboxes and debuggers need (namespaces, mounts, ptrace) stays.

use std::io;

use crate::sys;

/// Refused.
const REFUSED: [libc::c_long; 30] = [
    // programs in the kernel, and its counters
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    // memory tricks that exploits are built of
    libc::SYS_userfaultfd,
    libc::SYS_vmsplice,
    libc::SYS_process_madvise,
    libc::SYS_move_pages,
    libc::SYS_migrate_pages,
    libc::SYS_mbind,
    // a second way to make every other call
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    // keyrings are not in any namespace
    libc::SYS_keyctl,
    libc::SYS_add_key,
    libc::SYS_request_key,
    // files by number, past every folder
    libc::SYS_open_by_handle_at,
    libc::SYS_name_to_handle_at,
    // the machine's own business
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_acct,
    libc::SYS_quotactl,
    libc::SYS_syslog,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_lookup_dcookie,
];

#[cfg(target_arch = "x86_64")]
const ARCHITECTURE: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const ARCHITECTURE: u32 = 0xc000_00b7;

/// Calls with this bit are those of x32: the same ones under other numbers.
const X32: u32 = 0x4000_0000;

/// Offsets in what the kernel shows a filter.
const NUMBER: u32 = 0;
const ARCH: u32 = 4;

fn statement(code: u32, k: u32) -> libc::sock_filter {
    libc::sock_filter {
        code: code as u16,
        jt: 0,
        jf: 0,
        k,
    }
}

fn jump(test: u32, k: u32, yes: usize, no: usize) -> libc::sock_filter {
    libc::sock_filter {
        code: (libc::BPF_JMP | test | libc::BPF_K) as u16,
        // The program has far fewer than 255 steps.
        jt: yes as u8,
        jf: no as u8,
        k,
    }
}

/// The filter.
fn program() -> Vec<libc::sock_filter> {
    let load = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    let count = REFUSED.len();
    // Steps between a test and the refusal, which is last; the permission is before it.
    let mut program = vec![
        statement(load, ARCH),
        // Another architecture's calls have other numbers: none of them.
        jump(libc::BPF_JEQ, ARCHITECTURE, 0, count + 3),
        statement(load, NUMBER),
        jump(libc::BPF_JGE, X32, count + 1, 0),
    ];
    for (index, number) in REFUSED.iter().enumerate() {
        let number = u32::try_from(*number).unwrap_or(u32::MAX);
        program.push(jump(libc::BPF_JEQ, number, count - index, 0));
    }
    program.push(statement(libc::BPF_RET, libc::SECCOMP_RET_ALLOW));
    let refusal = libc::SECCOMP_RET_ERRNO | libc::ENOSYS.cast_unsigned();
    program.push(statement(libc::BPF_RET, refusal));
    program
}

/// Puts the filter on this process and all that it will start, for good. Needs no_new_privs.
/// Kernels without filters are left as they are; `false` then.
pub(crate) fn install() -> io::Result<bool> {
    match sys::install_filter(&program()) {
        Ok(()) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the kernel would do: the small machine of the filter.
    fn verdict(arch: u32, number: u32) -> u32 {
        let program = program();
        let (mut at, mut value) = (0, 0);
        loop {
            let step = program[at];
            at += 1;
            match u32::from(step.code) {
                code if code == libc::BPF_LD | libc::BPF_W | libc::BPF_ABS => {
                    value = if step.k == ARCH { arch } else { number };
                }
                code if code == libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K => {
                    at += usize::from(if value == step.k { step.jt } else { step.jf });
                }
                code if code == libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K => {
                    at += usize::from(if value >= step.k { step.jt } else { step.jf });
                }
                code if code == libc::BPF_RET => return step.k,
                code => panic!("{code}"),
            }
        }
    }

    #[test]
    fn what_is_listed_is_refused_and_nothing_else() {
        for number in 0..1000_u32 {
            let listed = REFUSED.contains(&libc::c_long::from(number));
            let allowed = verdict(ARCHITECTURE, number) == libc::SECCOMP_RET_ALLOW;
            assert_eq!(allowed, !listed, "{number}");
        }
        assert_ne!(verdict(ARCHITECTURE, X32 | 1), libc::SECCOMP_RET_ALLOW);
        assert_ne!(verdict(0x4000_0003, 1), libc::SECCOMP_RET_ALLOW, "i386");
    }
}
