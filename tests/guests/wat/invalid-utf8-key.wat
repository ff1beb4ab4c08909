;; Asks for a setting whose key is not UTF-8.
(module
  (import "querl:plugin/settings@0.1.0" "get" (func $get (param i32 i32 i32)))
  ;;! include reward

  (data (i32.const 1310) "\ff\fe")
  (func $odd (param i32)
    (call $get (i32.const 1310) (i32.const 2) (i32.const 512)))
)
