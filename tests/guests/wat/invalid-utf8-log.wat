;; Logs a line that is not UTF-8.
(module
  (import "querl:plugin/log@0.1.0" "log" (func $log (param i32 i32 i32)))
  ;;! include reward

  (data (i32.const 1310) "\e8\83\ff")
  (func $odd (param i32)
    (call $log (i32.const 1) (i32.const 1310) (i32.const 3)))
)
