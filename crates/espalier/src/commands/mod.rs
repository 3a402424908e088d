//! One file per subcommand.

pub(crate) mod doctor;
pub(crate) mod eval;
pub(crate) mod export;
pub(crate) mod harness;
pub(crate) mod inspect;
pub(crate) mod ledger;
pub(crate) mod policy;
pub(crate) mod rollout;
pub(crate) mod serve;
pub(crate) mod sft;
pub(crate) mod tasks;
pub(crate) mod train;
pub(crate) mod tree;
pub(crate) mod verify;

use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

/// A token that Ctrl-C (or SIGTERM) cancels. The watcher ends with the returned handle.
pub(crate) fn interrupts() -> (CancellationToken, AbortOnDropHandle<()>) {
    let token = CancellationToken::new();
    let watched = token.clone();
    #[expect(
        clippy::disallowed_methods,
        reason = "owned by the handle, which aborts it when dropped"
    )]
    let task = tokio::spawn(async move {
        let terminated = async {
            match tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate()) {
                Ok(mut signal) => {
                    signal.recv().await;
                }
                Err(_) => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = tokio::signal::ctrl_c() => {}
            () = terminated => {}
        }
        watched.cancel();
    });
    (token, AbortOnDropHandle::new(task))
}
