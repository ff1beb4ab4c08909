;; Calls `exit`, which would end the host process.
;;! package package wasi:cli@0.2.6 { interface exit { exit: func(status: result); } }
;;! world import wasi:cli/exit@0.2.6;
;;! world export querl:plugin/info@0.1.0;
;;! world export querl:plugin/rewards@0.1.0;
(module
  (import "wasi:cli/exit@0.2.6" "exit" (func $exit (param i32)))
  ;;! include reward
  (func $odd (param i32)
    (call $exit (i32.const 0)))
)
