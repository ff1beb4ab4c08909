;; Logs 100,000 empty lines.
(module
  (import "querl:plugin/log@0.1.0" "log" (func $log (param i32 i32 i32)))
  ;;! include reward

  (func $odd (param i32)
    (local $n_lines i32)
    (loop $again
      (call $log (i32.const 2) (i32.const 0) (i32.const 0))
      (local.set $n_lines (i32.add (local.get $n_lines) (i32.const 1)))
      (br_if $again (i32.lt_u (local.get $n_lines) (i32.const 100000)))))
)
