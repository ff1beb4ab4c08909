;; Only requests settings from the host, in a loop without end.
(module
  (import "querl:plugin/settings@0.1.0" "get" (func $get (param i32 i32 i32)))
  ;;! include reward

  (func $odd (param i32)
    (loop $again
      (call $get (i32.const 1280) (i32.const 5) (i32.const 512))
      (br $again)))
)
