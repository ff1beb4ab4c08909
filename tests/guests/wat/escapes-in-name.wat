;; A plugin whose name contains a terminal escape that clears the screen.
(module
  ;;! include memory
  ;;! include check-settings
  ;;! include range
  ;;! include scores
  (func $odd (param i32))
  (data (i32.const 1024) "a\1b[2Jb\e2\80\aec")
  (data (i32.const 1280) "0.1.0")
  (func (export "querl:plugin/info@0.1.0#describe") (result i32)
    (i32.store (i32.const 64) (i32.const 1024))
    (i32.store (i32.const 68) (i32.const 10))
    (i32.store (i32.const 72) (i32.const 1280))
    (i32.store (i32.const 76) (i32.const 5))
    (i32.const 64))
)
