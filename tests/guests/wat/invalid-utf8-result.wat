;; Rejects with a detail that is not UTF-8.
(module
  ;;! include reward

  ;;! include reject
  (data (i32.const 1310) "\e8\83\ff")
  (func $odd (param $result i32)
    (call $reject (local.get $result) (i32.const 1310) (i32.const 3)))
)
